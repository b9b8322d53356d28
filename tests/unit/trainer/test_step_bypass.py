"""Mismatch of a step in the ratio of the loss with bypass, and in the correction weights without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.trainer.collect.source import Collected
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.step import Trainer
from lockstep.trainer.stopwatch import Stopwatch
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import tiny_qwen3
from tests.unit.trainer.update.test_updater import close, expected_gradient, rollouts


class GivenRollouts:
    def collect(self, step: int, version: int, watch: Stopwatch, on_rollout: Any = None) -> Collected:
        with watch.stage("rollout"):
            sampled = tuple(rollouts())
        with watch.stage("reward"):
            return Collected(rollouts=sampled, trained=sampled)


class NoEngine:
    def sleep(self) -> None:
        pass

    def push(self, version: int) -> NoEngine:
        return self

    def metrics(self) -> dict[str, float]:
        return {}

    def take_changes(self) -> dict[str, float]:
        return {}


def step(logp_old: str) -> tuple[Policy, torch.Tensor, StepReport, int]:
    """Return policy, gradient, report and number of forward passes of one step."""
    torch.manual_seed(0)
    policy = Policy(tiny_qwen3(tied=True))
    passes = []
    policy.register_forward_pre_hook(lambda *_: passes.append(1))
    config = Config(algorithm=AlgorithmConfig(loss="ppo_clip", clip_low=0.2, clip_high=0.2, advantage_eps=0.0))
    config.correction.logp_old = logp_old
    config.correction.noise_floor_every = 0
    distributed = FakeRank(policy)
    trainer = Trainer(
        config,
        distributed=distributed,
        updater=Updater(policy, distributed, config),
        rollouts=GivenRollouts(),  # type: ignore[arg-type]  # only what a step calls
        reference=None,
        sync=NoEngine(),  # type: ignore[arg-type]
    )
    report = trainer.step()
    return policy, distributed.gradient, report, len(passes)


def test_with_bypass_the_ratio_of_the_loss_carries_the_mismatch_and_weights_are_one() -> None:
    policy, gradient, report, passes = step("bypass")
    samp_N = report.batch.sampling_logprobs_N
    a_N = torch.tensor([-0.5, 0.5, -0.5, 0.5])[report.batch.rollout_N] * 2**0.5

    def loss(logp_N: torch.Tensor) -> torch.Tensor:
        ratio_N = (logp_N - samp_N).clamp(-20, 20).exp()
        return -torch.minimum(ratio_N * a_N, ratio_N.clamp(0.8, 1.2) * a_N).mean()

    assert close(gradient, expected_gradient(policy, report.batch, loss))
    assert passes == 1, "one pack, without a pass to score it first"
    for name in ("ess", "is_weight_mean", "is_weight_max"):  # the ratio is the weight
        prefix = "rollout_correction/"
        assert report.metrics[prefix + name] == report.metrics[f"{prefix}raw_{name}"] != 1.0
    assert report.metrics["policy/ratio_mean"] != 1.0
    diff = float((samp_N - report.logp_train_N).mean())
    assert report.metrics["rollout_correction/kl"] == pytest.approx(diff, rel=1e-5)


def test_without_bypass_weights_carry_the_mismatch_and_the_ratio_of_the_loss_is_one() -> None:
    policy, gradient, report, _ = step("recompute")
    a_N = torch.tensor([-0.5, 0.5, -0.5, 0.5])[report.batch.rollout_N] * 2**0.5
    weights_N = (report.logp_train_N - report.batch.sampling_logprobs_N).exp().clamp(max=2.0)
    expected = expected_gradient(policy, report.batch, lambda logp_N: -(weights_N * a_N * logp_N).mean())
    assert close(gradient, expected)
    assert report.metrics["policy/ratio_mean"] == 1.0
    assert report.metrics["rollout_correction/is_weight_mean"] == pytest.approx(float(weights_N.mean()), rel=1e-5)
