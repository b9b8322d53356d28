"""Forms of the old policy: the first forward pass of the update gives the gradient of a pass before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.plan import OldLogprobs
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import FromEngine, FromUpdate, OldPolicy, Recomputed
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.batch_dumps import read_dump, write_dump
from lockstep.trainer.update.update_guard import Attempt
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import tiny_qwen3
from tests.unit.trainer.update.test_updater import rollouts


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(tiny_qwen3(tied=True).double())


@pytest.fixture
def batch() -> StepBatch:
    return StepBatch.of(rollouts(), mask_truncated=True)


def config(correction: dict[str, Any], **algorithm: Any) -> Config:
    return Config(
        token_budget=20,  # several microbatches
        algorithm=AlgorithmConfig(**({"normalizer": "token"} | algorithm)),
        correction=CorrectionConfig(**correction),
    )


def sampled_with(batch: StepBatch, logprobs_N: torch.Tensor) -> StepBatch:
    rows = []
    for index, row in enumerate(batch.rows):
        logprobs = row.sampling_logprobs.copy()
        start, end = batch.layout.token_start[index : index + 2]
        logprobs[row.loss_mask] = logprobs_N[start:end].numpy()
        rows.append(replace(row, sampling_logprobs=logprobs))
    return replace(batch, rows=tuple(rows))


@pytest.mark.parametrize(
    "correction", [{"high": 1.1}, {"mode": "token_mask", "low": 0.9, "high": 1.1}, {"mode": "off"}]
)
@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": "ppo_clip"},
        {"loss": "gspo"},
        {"loss": "clipped_tis", "importance_sampling_level": "sequence"},
        {"loss": "ppo_clip", "kl_coef": 0.1, "kl_estimator": "unbiased"},
        {"loss": "cispo", "normalizer": "grpo"},
    ],
    ids=lambda algorithm: algorithm["loss"],
)
def test_one_pass_gives_the_gradient_of_two(policy, batch, correction, algorithm):
    made = config(correction, **algorithm)
    assert made.plan.old is OldLogprobs.UPDATE
    distributed = FakeRank(policy)
    updater = Updater(policy, distributed, made)
    old_N = updater.scorer.score(batch)
    # Large enough a mismatch for the bounds to clip some weights.
    noise_N = 0.15 * torch.randn(len(old_N), generator=torch.Generator().manual_seed(1))
    batch = sampled_with(batch, old_N - noise_N)
    advantages_N = torch.tensor([-1.0, 1.0, -0.5, 2.0])[batch.rollout_N]
    ref_N = old_N - 0.3 if made.algorithm.kl_coef else None
    measured = StepCorrection.of(batch, Recomputed(old_N), made.correction).result
    if made.correction.mode != "off":
        assert 0 < measured.clipped_T.float().mean() < 1

    def targets(old: OldPolicy) -> Targets:
        correction = StepCorrection.of(batch, old, made.correction)
        return Targets(advantages_N=advantages_N, old=old, correction=correction, ref_logp_N=ref_N)

    updater.update(batch, targets(Recomputed(old_N)))
    expected = distributed.gradient
    seen_N = updater.update(batch, targets(FromUpdate())).logp_N
    assert float((distributed.gradient - expected).norm() / expected.norm()) < 1e-6
    torch.testing.assert_close(seen_N, old_N, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("correction", "algorithm"),
    [
        ({}, {"epochs": 2}),
        ({}, {"minibatches": 2}),
        ({"logp_old": "bypass", "mode": "off"}, {}),
        ({"mode": "sequence_truncate"}, {}),
        ({"batch_normalize": True}, {}),
        ({"rejection": {"token_k1": 1.0}}, {}),
        ({"kl_penalty": 0.1}, {}),
        ({}, {"kl_coef": 0.1, "kl_place": "reward"}),
        ({}, {"advantage": "gae"}),
    ],
    ids=str,
)
def test_settings_that_need_all_old_logprobs_recompute_them_first(correction, algorithm):
    bypasses = correction.get("logp_old") == "bypass"
    found = config(correction, **algorithm).plan.old
    assert found is (OldLogprobs.ENGINE if bypasses else OldLogprobs.TRAINER)


def test_trainer_logprobs_are_recomputed_ones_or_those_of_the_update() -> None:
    old_N, seen_N = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])
    assert Recomputed(old_N).by_trainer(seen_N) is old_N
    assert FromEngine(old_N).by_trainer(seen_N) is seen_N
    assert FromUpdate().by_trainer(seen_N) is seen_N


@pytest.mark.parametrize("form", [FromUpdate, FromEngine, Recomputed])
def test_a_dump_keeps_the_form(form: type[OldPolicy], batch: StepBatch, tmp_path) -> None:
    attempt = Attempt(update=1, number=1, rollouts=(0,), lr=0.1, is_first=True, reason="x", sums={}, grad_norm=1.0)
    old = FromUpdate() if form is FromUpdate else form(batch.sampling_logprobs_N - 0.1)
    settings = CorrectionConfig(logp_old="bypass" if form is FromEngine else "recompute", mode="token_truncate")
    advantages_N = torch.ones(batch.layout.num_tokens)
    targets = Targets(advantages_N=advantages_N, old=old, correction=StepCorrection.of(batch, old, settings))
    _, _, read = read_dump(write_dump(tmp_path, attempt, batch, targets), settings)
    assert type(read.old) is form
    index_T, logp_T = torch.tensor([0, 3]), torch.tensor([-1.0, -1.5])
    assert torch.equal(read.old.at(index_T, logp_T), old.at(index_T, logp_T))
    for correction in (read.correction, targets.correction):
        assert (correction.weights_N is None) == (form is FromUpdate)
    weights = [one.correction.weights_at(index_T, logp_T, logp_T - 0.2) for one in (read, targets)]
    assert torch.equal(*weights)
    torch.testing.assert_close(read.advantages_N, advantages_N)
