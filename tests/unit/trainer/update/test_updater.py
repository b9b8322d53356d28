"""Gradients of the update with weights, rejection, masks, KL and entropy, against formulas on plain logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, Targets, penalized, reference_metrics
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.correction.weights import CorrectionResult
from lockstep.trainer.objective.kl import kl_term
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, flat_gradient
from tests.fixtures.models import tiny_qwen3


def rollouts() -> list[Rollout]:
    rng = np.random.default_rng(3)

    def one(rollout_id: int, length: int, status: RolloutStatus = RolloutStatus.COMPLETED) -> Rollout:
        call = EngineCall(
            prompt_ids=tuple(rng.integers(5, 200, 4).tolist()),
            sampled_ids=tuple(rng.integers(5, 200, length).tolist()),
            sampled_logprobs=tuple((-6 + rng.normal(0, 0.5, length)).tolist()),
            finish_reason=FinishReason.STOP,
        )
        return Rollout(
            rollout_id=rollout_id, group_id=rollout_id // 2, calls=(call,), reward=float(rollout_id % 2), status=status
        )

    return [one(0, 7), one(1, 12), one(2, 3, RolloutStatus.TRUNCATED), one(3, 20)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(tiny_qwen3(tied=True))


@pytest.fixture
def batch() -> StepBatch:
    return StepBatch.of(rollouts(), mask_truncated=False)


def config(**algorithm: Any) -> Config:
    return Config(algorithm=AlgorithmConfig(**{"loss": "reinforce", "normalizer": "token"} | algorithm))


def gradient(policy: Policy, batch: StepBatch, made: Config, targets: Targets) -> tuple[Tensor, dict[str, float]]:
    distributed = FakeRank(policy)
    updater = Updater(policy, distributed, made)
    updated = updater.update(batch, targets)
    return distributed.gradient, dict(updated.metrics)


def expected_gradient(policy: Policy, batch: StepBatch, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a loss of (N,) logprobs from plain logits, row by row."""
    logp = []
    for row in batch.rows:
        ids = torch.from_numpy(row.ids)
        rows_logp = policy.causal_lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        logp.append(rows_logp[torch.from_numpy(row.loss_mask[1:])])
    loss(torch.cat(logp)).backward()
    found = flat_gradient(policy)
    policy.zero_grad()
    return found


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 1e-5


def random_logp(batch: StepBatch, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(-6 + rng.normal(0, 0.5, batch.layout.num_tokens)).float()


def scored(old_N: Tensor, ref_N: Tensor | None = None) -> Logprobs:
    return Logprobs(old=Recomputed(old_N), ref_N=ref_N)


def targets_of(
    batch: StepBatch, made: Config, logprobs: Logprobs, **correction: Any
) -> tuple[Targets, CorrectionResult, Tensor]:
    corrected = StepCorrection.of(batch, logprobs.old, CorrectionConfig(**correction))
    plain_N = torch.tensor([-1.0, 1.0, -0.5, 2.0])[batch.rollout_N]
    advantages_N = penalized(plain_N, batch, logprobs, corrected, made.algorithm)
    assert corrected.result is not None
    targets = Targets(advantages_N=advantages_N, old=logprobs.old, correction=corrected, ref_logp_N=logprobs.ref_N)
    return targets, corrected.result, advantages_N


def test_rejected_tokens_leave_the_denominator(policy: Policy, batch: StepBatch) -> None:
    made = config()
    logprobs = scored(random_logp(batch, 1))
    targets, weights, a_N = targets_of(batch, made, logprobs, mode="off", rejection={"token_k2": 0.1})
    keep_N = weights.keep_T
    assert 0 < int(keep_N.sum()) < len(keep_N)
    found, _ = gradient(policy, batch, made, targets)
    expected = expected_gradient(policy, batch, lambda logp: -(a_N * logp)[keep_N].sum() / keep_N.sum())
    assert close(found, expected)


def test_tokens_whose_weight_is_masked_stay_in_the_denominator(policy: Policy, batch: StepBatch) -> None:
    made = config()
    logprobs = scored(random_logp(batch, 1))
    targets, weights, a_N = targets_of(batch, made, logprobs, mode="token_mask", low=0.7, high=1.5)
    assert 0 < int(weights.clipped_T.sum()) < len(a_N)
    found, _ = gradient(policy, batch, made, targets)
    expected = expected_gradient(policy, batch, lambda logp: -(weights.weights_T * a_N * logp).sum() / len(a_N))
    assert close(found, expected)


def test_batch_normalized_weights_reach_the_gradient(policy: Policy, batch: StepBatch) -> None:
    made = config()
    logprobs = scored(random_logp(batch, 1))
    found = {}
    for normalize in (False, True):
        targets, weights, _ = targets_of(batch, made, logprobs, mode="token_truncate", batch_normalize=normalize)
        found[normalize], _ = gradient(policy, batch, made, targets)
    mean = float(weights.controlled_weights_T.mean())
    assert abs(mean - 1) > 0.01
    assert close(found[True] * mean, found[False])


def test_masked_rollouts_are_not_trained_but_count_in_the_denominator(policy: Policy) -> None:
    batch = StepBatch.of(rollouts(), mask_truncated=True)
    made = config(normalizer="sequence_sum")
    targets, _, a_N = targets_of(batch, made, scored(random_logp(batch, 1)), mode="off")
    keep_N = batch.rollout_N != 2
    found, _ = gradient(policy, batch, made, targets)
    expected = expected_gradient(policy, batch, lambda logp: -(a_N * logp)[keep_N].sum() / 4)
    assert close(found, expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_the_kl_term_of_the_loss_has_no_correction_weights(estimator: str, policy: Policy, batch: StepBatch) -> None:
    made = config(kl_coef=0.5, kl_estimator=estimator)
    old_N, ref_N = random_logp(batch, 1), random_logp(batch, 2)
    targets, weights, a_N = targets_of(batch, made, scored(old_N, ref_N), mode="token_truncate")

    def loss(logp_N: Tensor) -> Tensor:
        kl_N = kl_term(estimator, logp_N, ref_N, old_N)
        return (-weights.weights_T * a_N * logp_N + 0.5 * kl_N).sum() / len(a_N)

    found, _ = gradient(policy, batch, made, targets)
    assert close(found, expected_gradient(policy, batch, loss))


def test_kl_in_the_reward_is_a_penalty_on_each_token(policy: Policy, batch: StepBatch) -> None:
    made = config(kl_coef=0.5, kl_place="reward")
    old_N, ref_N = random_logp(batch, 1), random_logp(batch, 2)
    targets, _, _ = targets_of(batch, made, scored(old_N, ref_N), mode="off")
    plain_N = torch.tensor([-1.0, 1.0, -0.5, 2.0])[batch.rollout_N]
    torch.testing.assert_close(targets.advantages_N, plain_N - 0.5 * (old_N - ref_N))
    found, _ = gradient(policy, batch, made, targets)
    expected = expected_gradient(policy, batch, lambda logp: -(targets.advantages_N * logp).sum() / len(plain_N))
    assert close(found, expected)


def test_the_entropy_bonus_raises_entropy(policy: Policy, batch: StepBatch) -> None:
    """Without advantages the gradient is only that of the entropy: a step along it must raise the entropy."""
    made = config(entropy_coef=1.0)
    targets, _, _ = targets_of(batch, made, scored(random_logp(batch, 1)), mode="off")
    targets = replace(targets, advantages_N=torch.zeros_like(targets.advantages_N))
    found, before = gradient(policy, batch, made, targets)
    saved = [parameter.detach().clone() for parameter in policy.parameters()]
    pieces = found.float().split([parameter.numel() for parameter in policy.parameters()])
    with torch.no_grad():
        for parameter, piece in zip(policy.parameters(), pieces, strict=True):
            parameter -= 0.05 * piece.view_as(parameter) / found.norm()
    _, after = gradient(policy, batch, made, targets)
    with torch.no_grad():
        for parameter, old in zip(policy.parameters(), saved, strict=True):
            parameter.copy_(old)
    assert after["policy/entropy"] > before["policy/entropy"]


def test_the_mismatch_penalty_sums_to_zero_over_trained_tokens(batch: StepBatch) -> None:
    old_N = random_logp(batch, 1)
    targets, _, _ = targets_of(batch, config(), scored(old_N), mode="off", kl_penalty=2.0)
    plain_N = torch.tensor([-1.0, 1.0, -0.5, 2.0])[batch.rollout_N]
    added_N = targets.advantages_N - plain_N
    d_N = batch.sampling_logprobs_N - old_N
    assert float(added_N.sum()) == pytest.approx(0, abs=1e-4)
    torch.testing.assert_close(added_N, 2.0 * (d_N.mean() - d_N), atol=1e-5, rtol=1e-5)


def test_the_distance_from_the_reference_is_reported_per_rollout_and_per_token(batch: StepBatch) -> None:
    old_N = random_logp(batch, 1)
    assert reference_metrics(old_N, None, batch) == {}
    assert set(reference_metrics(old_N, old_N, batch).values()) == {0.0}
    shifted = reference_metrics(old_N, old_N - 0.1, batch)
    assert shifted["policy/ref_kl"] == pytest.approx(0.1, rel=1e-4)
    assert shifted["objective/kl"] == pytest.approx(0.1 * (7 + 12 + 3 + 20) / 4, rel=1e-4)
    assert shifted["policy/ref_kl_k3"] == pytest.approx(np.exp(-0.1) + 0.1 - 1, rel=1e-3)


def test_another_packing_scores_the_same_up_to_rounding(policy: Policy, batch: StepBatch) -> None:
    scorer = Updater(policy, FakeRank(policy), config()).scorer
    whole_N, repacked_N = scorer.score(batch), scorer.score_repacked(batch)
    assert len(scorer.share(batch, range(4)).packs) == 1
    assert len(scorer.share(batch, range(4), token_budget=24).packs) > 1
    assert float((whole_N - repacked_N).abs().max()) < 1e-4


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_before_the_policy_moves_every_ratio_is_one(minibatches: int, policy: Policy, batch: StepBatch) -> None:
    """`FakeRank` never steps, so each minibatch is a first one. With one minibatch the update packs the rows as the
    scoring pass did, and the ratio is 1 bit for bit; with more, up to the rounding of other packs."""
    made = config(loss="ppo_clip", minibatches=minibatches)
    old_N = Updater(policy, FakeRank(policy), made).scorer.score(batch)
    targets, _, _ = targets_of(batch, made, scored(old_N), mode="off")
    _, metrics = gradient(policy, batch, made, targets)
    if minibatches == 1:
        assert metrics["policy/ratio_mean"] == 1.0
        assert metrics["policy/approx_kl"] == 0.0
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/approx_kl"] < 1e-10


def test_results_of_microbatches_are_copied_to_the_host_after_the_last_backward(
    policy: Policy, batch: StepBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(config(), token_budget=24)  # a copy in between would make the host wait for the device
    logprobs = scored(random_logp(batch, 1))
    targets, _, _ = targets_of(batch, made, logprobs, mode="token_truncate")
    events: list[str] = []
    distributed = FakeRank(policy)
    updater = Updater(policy, distributed, made)
    cpu, tolist, backward = Tensor.cpu, Tensor.tolist, Tensor.backward
    as_float = Tensor.__float__
    monkeypatch.setattr(Tensor, "cpu", lambda self: events.append("copy") or cpu(self))
    monkeypatch.setattr(Tensor, "tolist", lambda self: events.append("copy") or tolist(self))
    monkeypatch.setattr(Tensor, "__float__", lambda self: events.append("copy") or as_float(self))
    monkeypatch.setattr(Tensor, "backward", lambda self: events.append("backward") or backward(self))
    updater.update(batch, targets)
    last = len(events) - events[::-1].index("backward")
    assert events[:last] == ["backward"] * events.count("backward")
    assert events.count("backward") > 1


def test_a_loss_of_a_file_gives_the_gradient_of_the_same_built_in_one(policy: Policy, batch: StepBatch, tmp_path):
    (tmp_path / "own.py").write_text(
        "from lockstep.trainer.objective.losses.inputs import LossInputs, weighted\n"
        "def fn(inputs: LossInputs, *, factor: float = 1.0):\n"
        "    return factor * weighted(-inputs.advantages_T * inputs.logp_T, inputs)\n"
    )
    own = config(loss=f"{tmp_path}/own.py:fn", loss_settings={"factor": 2})
    logprobs = scored(random_logp(batch, 1))
    expected, _ = gradient(policy, batch, config(), targets_of(batch, config(), logprobs, mode="token_truncate")[0])
    found, metrics = gradient(policy, batch, own, targets_of(batch, own, logprobs, mode="token_truncate")[0])
    assert torch.equal(found, 2 * expected)
    assert "policy/approx_kl" in metrics
