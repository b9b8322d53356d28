"""Old logprobs from the update's own forward pass: the gradient and the evidence of a pass of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import tiny_qwen3
from tests.unit.trainer.update.test_updater import rollouts
from trainer.batch.step_batch import StepBatch, decode, encode
from trainer.config.schema import AlgorithmConfig, Config, CorrectionConfig
from trainer.credit.targets import Logprobs, Targets, scored_by_the_update
from trainer.model.policy import Policy
from trainer.objective.correction import correction_weights
from trainer.update.batch_dumps import Attempt, read_dump, write_dump
from trainer.update.updater import Updater


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(tiny_qwen3(tied=True).double())


@pytest.fixture
def batch() -> StepBatch:
    return decode([encode(rollouts(), mask_truncated=True)])


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
    assert scored_by_the_update(made)
    distributed = FakeRank(policy)
    updater = Updater(policy, distributed, made)
    old_N = updater.scorer.score(batch)
    # The engine's logprobs are off by so much that bounds cut some of them.
    noise_N = 0.15 * torch.randn(len(old_N), generator=torch.Generator().manual_seed(1))
    batch = sampled_with(batch, old_N - noise_N)
    advantages_N = torch.tensor([-1.0, 1.0, -0.5, 2.0])[batch.rollout_N]
    ref_N = old_N - 0.3 if made.algorithm.kl_coef else None
    settings = made.correction
    corrected = correction_weights(
        old_N,
        batch.sampling_logprobs_N,
        batch.rollout_N,
        batch.num_rollouts,
        mode=settings.mode,
        bounds=(settings.low, settings.high),
    )
    if settings.mode != "off":
        assert 0 < corrected.clipped_T.float().mean() < 1

    updater.update(batch, Targets.of(batch, advantages_N, Logprobs(old_N=old_N, ref_N=ref_N), corrected))
    expected = distributed.gradient
    _, seen_N = updater.update(batch, Targets.of(batch, advantages_N, Logprobs(old_N=None, ref_N=ref_N), None))
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
def test_what_needs_all_old_logprobs_first_has_a_pass_of_its_own(correction, algorithm):
    assert not scored_by_the_update(config(correction, **algorithm))


def test_a_dump_says_that_the_update_scored_for_itself(batch, tmp_path):
    attempt = Attempt(update=1, number=1, rollouts=(0,), lr=0.1, is_first=True, reason="x", sums={}, grad_norm=1.0)
    advantages_N = torch.ones(batch.layout.num_tokens)
    targets = Targets.of(batch, advantages_N, Logprobs(old_N=None), None)
    _, _, read = read_dump(write_dump(tmp_path, attempt, batch, targets))
    assert read.old_logp_N is None
    assert read.weights_N is None
    torch.testing.assert_close(read.advantages_N, advantages_N)
