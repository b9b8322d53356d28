"""Batches without a learning signal: with or without an update, every number is finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.observe.step_metrics import token_metrics
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.unit.trainer.update.test_updater import config, policy, rollouts  # noqa: F401  # `policy` is a fixture


def update(policy: Policy, batch: StepBatch) -> tuple[dict[str, float], torch.Tensor, int]:  # noqa: F811
    """Return metrics, gradient and number of updates of a batch."""
    distributed = FakeRank(policy)
    made = config(advantage="grpo", loss="ppo_clip", kl_coef=0.0)
    updater = Updater(policy, distributed, made)
    logprobs = Logprobs(old=Recomputed(updater.scorer.score(batch)))
    correction = StepCorrection.of(batch, logprobs.old, made.correction)
    targets, metrics = rollout_targets(batch, logprobs, correction, made.algorithm)
    updated = updater.update(batch, targets)
    return {**metrics, **updated.metrics}, distributed.gradient, updater.num_updates


def assert_finite(metrics: dict[str, float]) -> None:
    assert {name: value for name, value in metrics.items() if not math.isfinite(value)} == {}


def test_identical_rewards_give_a_zero_gradient(policy: Policy) -> None:  # noqa: F811
    same = [replace(rollout, reward=1.0) for rollout in rollouts()]
    metrics, gradient, updates = update(policy, StepBatch.of(same, mask_truncated=False))
    assert_finite(metrics)
    assert updates == 1
    assert float(gradient.abs().max()) == 0.0
    assert metrics["reward/zero_std_fraction"] == 1.0


def test_an_empty_completion_is_not_trained_but_its_group_is(policy: Policy) -> None:  # noqa: F811
    silent = EngineCall(prompt_ids=(5, 6), sampled_ids=(), sampled_logprobs=(), finish_reason=FinishReason.STOP)
    first, *others = rollouts()
    given = [replace(first, calls=(silent,)), *others]
    batch = StepBatch.of(given, mask_truncated=False)
    assert batch.num_rollouts == len(others)
    metrics, gradient, updates = update(policy, batch)
    assert_finite(metrics)
    assert updates == 1
    assert float(gradient.norm()) > 0
    assert token_metrics(given, batch)["rollout/trained_fraction"] == 1.0


@pytest.mark.parametrize("mask_truncated", [True, False])
def test_a_batch_of_masked_rollouts_gives_finite_numbers(policy: Policy, mask_truncated: bool) -> None:  # noqa: F811
    cut = [replace(rollout, status=RolloutStatus.TRUNCATED) for rollout in rollouts()]
    metrics, gradient, updates = update(policy, StepBatch.of(cut, mask_truncated=mask_truncated))
    assert_finite(metrics)
    assert updates == 1
    assert (float(gradient.norm()) > 0) == (not mask_truncated)


def test_a_batch_without_a_trainable_rollout_makes_no_update(policy: Policy) -> None:  # noqa: F811
    failed: list[Rollout] = [replace(rollout, status=RolloutStatus.FAILED) for rollout in rollouts()]
    metrics, gradient, updates = update(policy, StepBatch.of(failed, mask_truncated=False))
    assert updates == 0
    assert len(gradient) == 0
    assert_finite(metrics)
