"""Correction weights and rejection by hand, for any order of the tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.errors import EvidenceError
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES, REJECTION_CRITERIA
from lockstep.trainer.objective.correction.rejection import rejection_mask
from lockstep.trainer.objective.correction.weights import correction_weights, kl_penalized_advantages

LOG = math.log
# Two rollouts; ratios 4, 1/4, 1 (rollout 0: product 1, geometric mean 1) and 8, 2 (rollout 1: product 16, mean 4).
RATIOS = [4.0, 8.0, 0.25, 2.0, 1.0]
ROLLOUT_T = torch.tensor([0, 1, 0, 1, 0])
SAMP_T = torch.full((5,), -3.0, dtype=torch.float64)
OLD_T = SAMP_T + torch.tensor(RATIOS, dtype=torch.float64).log()


def weights(mode: str, bounds=(0.0, 2.0), **options) -> list[float]:
    return correction_weights(OLD_T, SAMP_T, ROLLOUT_T, 3, mode=mode, bounds=bounds, **options).weights_T.tolist()


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("token_truncate", (0.0, 2.0), [2.0, 2.0, 0.25, 2.0, 1.0]),
        ("token_truncate", (0.5, 3.0), [3.0, 3.0, 0.5, 2.0, 1.0]),
        ("token_mask", (0.0, 2.0), [0.0, 0.0, 0.25, 2.0, 1.0]),
        ("token_mask", (0.5, 4.0), [4.0, 0.0, 0.0, 2.0, 1.0]),
        ("sequence_truncate", (0.0, 2.0), [1.0, 2.0, 1.0, 2.0, 1.0]),
        ("sequence_mask", (0.0, 2.0), [1.0, 0.0, 1.0, 0.0, 1.0]),
        ("sequence_mask", (0.0, 5.0), [1.0, 4.0, 1.0, 4.0, 1.0]),
        ("sequence_product_truncate", (0.0, 10.0), [1.0, 10.0, 1.0, 10.0, 1.0]),
        ("sequence_product_mask", (0.0, 20.0), [1.0, 16.0, 1.0, 16.0, 1.0]),
        ("off", (0.0, 2.0), [1.0] * 5),
        ("none", (0.0, 2.0), [1.0] * 5),
    ],
)
def test_weights_by_mode_and_bounds(mode, bounds, expected):
    assert weights(mode, bounds) == pytest.approx(expected)


def test_modes_are_the_documented_names():
    assert set(CORRECTION_MODES) == {
        *("none", "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        *("sequence_product_truncate", "sequence_product_mask"),
    }


def test_clipped_marks_weights_changed_by_control_and_raw_weights_keep_the_ratios():
    result = correction_weights(OLD_T, SAMP_T, ROLLOUT_T, 3, mode="token_mask", bounds=(0.5, 4.0))
    assert result.clipped_T.tolist() == [False, True, True, False, False]
    assert result.raw_weights_T.tolist() == pytest.approx(RATIOS)
    assert result.keep_T.all(), "a masked weight stays in the loss mask, and so in the denominators"


def test_log_ratio_is_clamped_to_twenty_before_exp():
    old_T, samp_T = torch.tensor([-1.0, -500.0]), torch.tensor([-500.0, -1.0])
    result = correction_weights(old_T, samp_T, torch.tensor([0, 1]), 2, mode="token_truncate", bounds=(0.0, 1e12))
    assert result.weights_T.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_weights_are_detached_and_keep_the_dtype():
    for dtype in (torch.float32, torch.float64):
        old_T = OLD_T.to(dtype).requires_grad_()
        result = correction_weights(
            old_T, SAMP_T.to(dtype), ROLLOUT_T, 3, mode="sequence_mask", bounds=(0.0, 2.0), batch_normalize=True
        )
        assert result.weights_T.dtype == dtype
        assert not result.weights_T.requires_grad


def test_batch_normalization_averages_tokens_or_rollouts():
    # token: mean of 2, 2, .25, 2, 1 is 1.45; sequence: rollouts have 1 and 2, the third has no tokens
    assert weights("token_truncate", (0.0, 2.0), batch_normalize=True) == pytest.approx(
        [x / 1.45 for x in [2, 2, 0.25, 2, 1]]
    )
    assert weights("sequence_truncate", (0.0, 2.0), batch_normalize=True) == pytest.approx(
        [x / 1.5 for x in [1, 2, 1, 2, 1]]
    )
    assert weights("token_mask", (100.0, 200.0), batch_normalize=True) == [0.0] * 5


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_a_step_without_tokens_has_no_weights(mode):
    empty = torch.zeros(0)
    result = correction_weights(
        empty, empty, empty.long(), 2, mode=mode, bounds=(0, 2), rejection={"seq_max_k3": 0.1}, batch_normalize=True
    )
    assert result.weights_T.shape == (0,)
    assert result.metrics["rollout_correction/rejected_frac"] == 0.0


# k1 = −log ρ = samp − old. Rollout 0: −log 4, log 4, 0. Rollout 1: −log 8, −log 2.
@pytest.mark.parametrize(
    ("criterion", "threshold", "kept"),
    [
        ("token_k1", 4.1, [True, False, True, True, True]),
        ("token_k1", 2.1, [False, False, False, True, True]),
        ("token_k2", 0.5 * LOG(4) ** 2 + 1e-9, [True, False, True, True, True]),
        ("token_k3", 1.0, [False, False, True, True, True]),  # 4−log 4−1 = 1.61; .25+log 4−1 = .64; 2−log 2−1 = .31
        ("seq_sum_k1", 10.0, [True, False, True, False, True]),  # sums 0 and −log 16
        ("seq_sum_k1", 16.1, [True, True, True, True, True]),
        ("seq_sum_k2", 2.0, [True, False, True, False, True]),  # log²4 = 1.92; (log²8 + log²2)/2 = 2.40
        ("seq_sum_k3", 3.0, [True, False, True, False, True]),  # 1.61 + .64 = 2.25; 4.92 + .31 = 5.23
        ("seq_mean_k1", 3.9, [True, False, True, False, True]),  # means 0 and −log 4
        ("seq_mean_k2", 1.0, [True, False, True, False, True]),  # .64 and 1.20
        ("seq_mean_k3", 0.8, [True, False, True, False, True]),  # .75 and 2.61
        ("seq_max_k2", 1.0, [True, False, True, False, True]),  # .96 and 2.16
        ("seq_max_k3", 1.5, [False, False, False, False, False]),  # 1.61 and 4.92
        ("seq_max_k3", 1.7, [True, False, True, False, True]),
    ],
)
def test_rejection_by_criterion(criterion, threshold, kept):
    keep_T, metrics = rejection_mask(OLD_T - SAMP_T, ROLLOUT_T, 3, {criterion: threshold})
    assert keep_T.tolist() == kept
    rejected = 1 - sum(kept) / 5
    assert metrics["rollout_correction/rejected_frac"] == pytest.approx(rejected)
    assert metrics[f"rollout_correction/rejected_{criterion}_frac"] == pytest.approx(rejected)


def test_a_token_must_pass_every_criterion():
    criteria = {"token_k1": 4.1, "token_k3": 1.0, "seq_mean_k2": 1.0}
    keep_T, metrics = rejection_mask(OLD_T - SAMP_T, ROLLOUT_T, 3, criteria)
    assert keep_T.tolist() == [False, False, True, False, True]
    assert metrics["rollout_correction/rejected_frac"] == pytest.approx(0.6)
    assert metrics["rollout_correction/rejected_token_k1_frac"] == pytest.approx(0.2)
    assert metrics["rollout_correction/rejected_rollouts_frac"] == 1.0


def test_rejection_does_not_change_the_weights_of_others():
    options = {"mode": "sequence_truncate", "bounds": (0.0, 9.0)}
    plain = correction_weights(OLD_T, SAMP_T, ROLLOUT_T, 3, **options)
    rejecting = correction_weights(OLD_T, SAMP_T, ROLLOUT_T, 3, **options, rejection={"token_k1": 4.0})
    assert not rejecting.keep_T.all()
    assert torch.equal(plain.weights_T, rejecting.weights_T)


def test_kl_penalty_is_the_mean_difference_minus_the_difference_of_the_token():
    advantages_T = torch.tensor([1.0, 1.0, -1.0])
    samp_T, train_T = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.2, -2.0, -3.7])
    penalized = kl_penalized_advantages(
        advantages_T, samp_T, train_T.requires_grad_(), coef=0.1, keep_T=torch.ones(len(samp_T), dtype=torch.bool)
    )
    # d = .2, 0, .7, mean .3
    assert penalized.tolist() == pytest.approx([1.01, 1.03, -1.04])
    assert not penalized.requires_grad
    assert float((penalized - advantages_T).sum()) == pytest.approx(0.0, abs=1e-7)


def test_kl_penalty_takes_the_mean_over_the_loss_mask():
    """A rejected outlier must not shift the others. d = 0.2, 0, 8; the mean of the first two is 0.1."""
    samp_T, train_T = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.2, -2.0, -9.0])
    keep_T = torch.tensor([True, True, False])
    penalized = kl_penalized_advantages(torch.ones(3), samp_T, train_T, coef=0.1, keep_T=keep_T)
    assert penalized[keep_T].tolist() == pytest.approx([0.99, 1.01])


def test_kl_penalty_of_an_empty_step_is_empty():
    empty = torch.zeros(0)
    assert kl_penalized_advantages(empty, empty, empty, coef=0.1, keep_T=empty.bool()).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logprobs_that_are_not_finite_are_refused(bad):
    samp_T = SAMP_T.clone()
    samp_T[3] = bad
    with pytest.raises(
        EvidenceError, match=r"1 of 5 engine logprobs are not finite; the first is .* token 3, rollout 1"
    ):
        correction_weights(OLD_T, samp_T, ROLLOUT_T, 3, mode="off", bounds=(0, 2))
    with pytest.raises(EvidenceError, match="trainer logprobs"):
        correction_weights(samp_T, OLD_T, ROLLOUT_T, 3, mode="off", bounds=(0, 2))


def test_logprobs_of_different_lengths_are_refused():
    with pytest.raises(EvidenceError, match=r"logp_samp \(4,\)"):
        correction_weights(OLD_T, SAMP_T[:4], ROLLOUT_T, 3, mode="off", bounds=(0, 2))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(sorted(CORRECTION_MODES)),
    criteria=st.lists(st.sampled_from(sorted(REJECTION_CRITERIA)), max_size=3, unique=True),
    batch_normalize=st.booleans(),
)
def test_weights_and_rejection_do_not_depend_on_the_order_of_tokens(seed, mode, criteria, batch_normalize):
    """Rows of a rollout may lie anywhere in the step."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = 40
    rollout_T = torch.randint(7, (num_tokens,), generator=generator)
    samp_T = -torch.rand(num_tokens, generator=generator, dtype=torch.float64) * 3
    old_T = samp_T + 0.4 * torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    order_T = torch.randperm(num_tokens, generator=generator)
    options = {
        "mode": mode,
        "bounds": (0.7, 1.5),
        "rejection": {name: 1.6 if name.endswith("k1") else 0.3 for name in criteria},
        "batch_normalize": batch_normalize,
    }
    straight = correction_weights(old_T, samp_T, rollout_T, 8, **options)
    shuffled = correction_weights(old_T[order_T], samp_T[order_T], rollout_T[order_T], 8, **options)
    torch.testing.assert_close(shuffled.weights_T, straight.weights_T[order_T], rtol=0, atol=1e-12)
    assert torch.equal(shuffled.keep_T, straight.keep_T[order_T])
    assert shuffled.metrics == pytest.approx(straight.metrics)


def test_shares_of_rejection_are_exact() -> None:
    """One of three rollouts; a float32 quotient is wrong in the eighth digit."""
    _, metrics = rejection_mask(torch.tensor([3.0, 0.0, 0.0]), torch.arange(3), 3, {"token_k2": 1.0})
    assert metrics["rollout_correction/rejected_frac"] == 1 / 3
    assert metrics["rollout_correction/rejected_rollouts_frac"] == 1 / 3
