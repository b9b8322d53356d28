"""Planted faults of a loss are named, and losses without a fault pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.lab.finding import Finding, Verdict
from lockstep.lab.losses.loss_checks import examine_loss
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.own.lookup import policy_loss_named

FAULTY = Path(__file__).with_name("faulty_losses.py")
SETTINGS = {"gspo": {"clip_low": 0.3, "clip_high": 0.4}}
"""Bounds within which the ratios of the toy lie."""


def sentences(function: str, verdict: Verdict = Verdict.FAILS) -> list[str]:
    findings = examine_loss(policy_loss_named(f"{FAULTY}:{function}"), {})
    return [finding.sentence for finding in findings if finding.verdict is verdict]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_built_in_loss_passes(name: str) -> None:
    findings = list(examine_loss(POLICY_LOSSES[name], SETTINGS.get(name, {})))
    assert len(findings) > 13
    assert [finding for finding in findings if finding.verdict is not Verdict.OK] == []


@pytest.mark.parametrize("function", ["surrogate", "right_backward", "declared_sequence", "under_no_grad"])
def test_an_unusual_loss_without_a_fault_passes(function: str) -> None:
    assert sentences(function) == sentences(function, Verdict.NOTE) == []


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("mean_of_microbatch", "one number for all tokens of the microbatch"),
        ("divided_by_tokens", "it divides by the number of tokens in the microbatch"),
        ("centered_in_microbatch", "depends on the other tokens"),
        ("mean_of_rollout", "depends on the other tokens"),
    ],
)
def test_a_mean_over_the_microbatch_is_named_with_its_cause(function: str, cause: str) -> None:
    assert any(cause in sentence and "leave the microbatch" in sentence for sentence in sentences(function))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("mean_of_microbatch", "returned the shape (), expected (16,): one loss per token"),
        ("old_with_gradient", "has a gradient through old_logp_T"),
        ("unbounded", "The loss is nan at a log ratio of 100 and the advantage -3"),
        ("world_size", "It uses get_world_size of torch.distributed"),
        ("wrong_backward", "a hand-written backward is wrong"),
        ("mean_metric", "over two; return the sum over the tokens"),
        ("metric_of_some_microbatches", "The metrics own/ratio are not in every microbatch"),
        ("metric_with_gradient", "'own/ratio' as a tensor of float64 with the shape () with a gradient"),
        ("random", "Two calls with the same inputs differ"),
        ("in_place", "It changes advantages_T in place"),
        ("crashes", "crashes fails: RuntimeError in line"),
        ("detached", "The losses have no gradient"),
        ("without_weights", "With weights of 2 the losses are not 2 times those without weights"),
        ("flat_at_old", "The gradient is 0 at π_θ = π_old"),
        ("undeclared_sequence", "AttributeError in line"),
        (
            "wrong_sign",
            "lowers the probability of rewarded tokens (7 of 7) and raises the probability of punished tokens",
        ),
        ("absolute_advantage", "The first update raises the probability of punished tokens (8 of 8)"),
        ("wrong_sign_of_large_advantages", "lowers the probability of rewarded tokens (2 of 7)"),
        ("max_for_min", "max stands in place of min"),
        ("max_for_min_in_sequences", "max stands in place of min"),
        ("swapped_bounds", "max stands in place of min"),
        ("without_first_rollout", "Only 7 of 8 rollouts, 12 of 15 tokens have a gradient at π_θ = π_old"),
        ("without_last_rollout", "Only 7 of 8 rollouts, 13 of 15 tokens have a gradient"),
        ("without_first_token", "The first without one is in rollout 0, with the advantage 1"),
        ("without_every_second_rollout", "Only 4 of 8 rollouts, 8 of 15 tokens have a gradient"),
        ("two_temperatures", "the two logprobs have different temperatures"),
        ("weight_with_gradient", "a factor is not detached"),
        ("ratio_to_sampling", "so μ counts twice"),
        ("kl_of_wrong_sign", "(log ratio 0.3) is moved further away from the old policy"),
        ("kl_as_log_ratio", "(log ratio 0.3) is moved further away from the old policy"),
        ("never_raised", "A rewarded token that became less likely has no gradient, at whatever ratio"),
        ("without_small_advantages", "Only 6 of 8 rollouts, 10 of 15 tokens have a gradient"),
    ],
)
def test_a_planted_fault_is_named(function: str, sentence: str) -> None:
    assert any(sentence in found for found in sentences(function))


@pytest.mark.parametrize(
    "function", ["old_with_gradient", "unbounded", "wrong_backward", "world_size", "without_weights", "mean_metric"]
)
def test_one_fault_does_not_blame_the_microbatch(function: str) -> None:
    assert not any("leave the microbatch" in sentence for sentence in sentences(function))


def test_a_loss_of_one_sign_is_noted_with_the_share_of_rollouts() -> None:
    findings = {found.check: found for found in examine_loss(policy_loss_named(f"{FAULTY}:only_rewarded"), {})}
    found = findings["gradient in the first update"]
    assert (found.verdict, found.measured) == (Verdict.NOTE, "4 of 8 rollouts, 7 of 15 tokens")
    assert found.sentence == "Only tokens whose advantage is above 0 are trained."
    assert sentences("only_rewarded") == []


@pytest.mark.parametrize("function", ["clipped", "masked_on_both_sides", "bounded_above", "kl"])
def test_bounds_of_other_algorithms_pass(function: str) -> None:
    assert sentences(function) == []


@pytest.mark.parametrize("function", ["random", "in_place", "crashes"])
def test_a_loss_that_cannot_be_examined_has_one_failure(function: str) -> None:
    assert len(sentences(function)) == 1


def test_a_weight_by_probability_is_a_note() -> None:
    assert sentences("weighted_by_probability") == []
    assert "weighs tokens by their probability" in sentences("weighted_by_probability", Verdict.NOTE)[0]


def test_a_loss_without_a_ratio_is_told_to_declare_it() -> None:
    assert "@policy_loss(has_ratio=False)" in sentences("no_ratio", Verdict.NOTE)[0]
    assert sentences("no_ratio") == []


def test_settings_reach_the_loss() -> None:
    findings: list[Finding] = list(examine_loss(policy_loss_named(f"{FAULTY}:surrogate"), {"scale": 0.0}))
    assert any("nothing is trained" in finding.sentence for finding in findings)
