"""Mismatch metrics against plain Python loops over their formulas, for any order of the tokens."""

from __future__ import annotations

import math
import re
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.trainer.objective.correction import mismatch
from lockstep.trainer.objective.correction.mismatch import (
    FORCED_LOGPROB,
    LENGTH_BUCKETS,
    UNKNOWN_VERSION,
    mismatch_metrics,
    noise_floor,
    quantization_cost,
)
from lockstep.trainer.objective.correction.modes import PREFIX, QUANTIZATION_K3
from lockstep.trainer.objective.correction.weights import CorrectionResult, correction_weights
from lockstep.trainer.observe.alarms import AlarmThresholds, alarms, disagreement, notes

TRAIN = [-1.0, -2.0, -0.5, -0.001, -3.0, -0.7]
SAMP = [-1.1, -1.5, -0.5, -0.002, -3.4, -1.9]
ROLLOUT = [0, 0, 3, 1, 1, 1]  # rollout 2 was delivered without trained tokens
VERSION = [4, 5, 5, 3, UNKNOWN_VERSION, 5]


def correction(**options) -> CorrectionResult:
    return correction_weights(
        torch.tensor(TRAIN, dtype=torch.float64),
        torch.tensor(SAMP, dtype=torch.float64),
        torch.tensor(ROLLOUT),
        4,
        **{"bounds": (0.0, 2.0)} | options,
    )


def metrics_of(**options) -> dict[str, float]:
    found = mismatch_metrics(
        torch.tensor(TRAIN, dtype=torch.float64),
        torch.tensor(SAMP, dtype=torch.float64),
        torch.tensor(ROLLOUT),
        4,
        version_T=torch.tensor(VERSION),
        current_version=6,
        **options,
    )
    assert all(name.startswith(PREFIX) for name in found)
    return {name.removeprefix(PREFIX): value for name, value in found.items()}


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def expected_metrics(weights: list[float], raw: list[float], clipped: list[bool]) -> dict[str, float]:
    """Return the metrics of docs/correction.md by their formulas."""
    d = [s - t for s, t in zip(SAMP, TRAIN, strict=True)]
    rho = [math.exp(-x) for x in d]

    def per_rollout(values):
        groups = {}
        for rollout, value in zip(ROLLOUT, values, strict=True):
            groups.setdefault(rollout, []).append(value)
        return [mean(values) for values in groups.values()]

    d_S, train_S, samp_S = per_rollout(d), per_rollout(TRAIN), per_rollout(SAMP)
    unforced = [x for x, s in zip(d, SAMP, strict=True) if s < -0.01]
    lags = [6 - v for v in VERSION if v != UNKNOWN_VERSION]
    expected = {
        "kl": mean(d),
        "kl_v1": mean(d),
        "kl_v2": mean(x * x / 2 for x in d),
        "k3_kl": mean(r - math.log(r) - 1 for r in rho),
        "training_ppl": mean(math.exp(-x) for x in train_S),
        "rollout_ppl": mean(math.exp(-x) for x in samp_S),
        "training_log_ppl": mean(-x for x in train_S),
        "rollout_log_ppl": mean(-x for x in samp_S),
        "log_ppl_diff": mean(d_S),
        "log_ppl_abs_diff": mean(abs(x) for x in d_S),
        "log_ppl_diff_max": max(d_S),
        "log_ppl_diff_min": min(d_S),
        "ppl_ratio": mean(math.exp(x) for x in d_S),
        "chi2_token": mean(r * r for r in rho) - 1,
        "chi2_seq": mean(math.exp(-x) ** 2 for x in d_S) - 1,
        "clipped_frac": mean(float(c) for c in clipped),
        "logp_diff_abs_mean": mean(abs(x) for x in d),
        "logp_diff_abs_max": max(abs(x) for x in d),
        "pearson": statistics.correlation(TRAIN, SAMP),
        "stale_tokens_frac": mean(float(lag > 0) for lag in lags),
        "version_lag_mean": mean(lags),
        "version_lag_max": max(lags),
        "forced_token_ratio": 1 / 6,
        "kl_v1_unforced": mean(unforced),
        "kl_v2_unforced": mean(x * x / 2 for x in unforced),
        "weight_removed/len_1-64": sum(max(r - w, 0) for r, w, c in zip(raw, weights, clipped, strict=True) if c)
        / sum(raw),
    }
    for prefix, values in (("", weights), ("raw_", raw)):
        normalized = [w / mean(values) for w in values] if mean(values) else []
        expected |= {
            f"{prefix}ess": 1 / mean(w * w for w in normalized) if normalized else 0.0,
            f"{prefix}is_weight_mean": mean(values),
            f"{prefix}is_weight_std": statistics.pstdev(values),
            f"{prefix}is_weight_max": max(values),
            f"{prefix}is_weight_min": min(values),
        }
    return expected


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "token_truncate", "bounds": (0.0, 1.2)},
        {"mode": "token_mask", "bounds": (0.7, 1.6)},
        {"mode": "token_mask", "bounds": (50.0, 60.0)},
        {"mode": "sequence_truncate", "bounds": (0.0, 1.1)},
        {"mode": "sequence_mask", "bounds": (0.0, 1.1), "batch_normalize": True},
        {"mode": "off"},
    ],
    ids=str,
)
def test_every_metric_equals_its_formula(options):
    result = correction(**options)
    expected = expected_metrics(
        result.controlled_weights_T.tolist(), result.raw_weights_T.tolist(), result.clipped_T.tolist()
    )
    assert metrics_of(correction=result) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_shared_metrics_have_the_values_of_verl_and_ms_swift():
    """Numbers computed from the formulas of verl's `compute_offpolicy_metrics` and ms-swift's
    `_compute_rollout_offpolicy_metrics`, for rollouts with d = (-0.5, 1.0) and (-0.4)."""
    train = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    samp = torch.tensor([-1.5, -1.0, -0.9], dtype=torch.float64)
    rollout = torch.tensor([0, 0, 1])
    weights = correction_weights(train, samp, rollout, 2, mode="token_truncate", bounds=(0.0, 1.2))
    found = mismatch_metrics(train, samp, rollout, 2, correction=weights)
    shared = {
        "kl": 0.0333333333,  # verl; ms-swift's Megatron trainer has the other sign
        "k3_kl": 0.2028084698,
        "training_ppl": 3.0652051705,
        "rollout_ppl": 2.9749730343,
        "training_log_ppl": 1.0,
        "rollout_log_ppl": 1.075,
        "log_ppl_diff": -0.075,
        "log_ppl_abs_diff": 0.325,
        "log_ppl_diff_max": 0.25,
        "log_ppl_diff_min": -0.4,
        "ppl_ratio": 0.9771727314,
        "chi2_token": 0.6930526801,
        "chi2_seq": 0.4160357941,  # ms-swift; verl squares the product: 0.2967101848
        "is_weight_mean": 0.9226264804,
        "clipped_frac": 2 / 3,
        "ess": 0.8469104186,  # of the weights that train; both clamp them into [1 / 1.2, 1.2] first: 0.9749248783
    }
    assert {name: found[PREFIX + name] for name in shared} == pytest.approx(shared, rel=1e-9)


def test_without_correction_weights_are_one_and_raw_is_the_token_ratio():
    ratios = [math.exp(t - s) for t, s in zip(TRAIN, SAMP, strict=True)]
    assert metrics_of() == pytest.approx(expected_metrics([1.0] * 6, ratios, [False] * 6), rel=1e-9, abs=1e-12)


def test_kl_is_positive_when_the_sampler_has_higher_logprobs_than_the_trainer():
    """The formula in the ms-swift docs ("Training-Inference-Mismatch") has the other sign; the code of ms-swift, "KL
    Divergence Analysis" (jphme, gist, 2026) and verl have this one."""
    found = mismatch_metrics(torch.tensor([-2.0]), torch.tensor([-1.5]), torch.tensor([0]), 1)
    assert found[PREFIX + "kl"] == pytest.approx(0.5)
    assert found[PREFIX + "log_ppl_diff"] == pytest.approx(0.5)
    assert found[PREFIX + "ppl_ratio"] == pytest.approx(math.exp(0.5))
    assert found[PREFIX + "training_ppl"] > found[PREFIX + "rollout_ppl"]


def test_equal_logprobs_give_exact_zeros_and_ones():
    logp_T = -torch.rand(100, generator=torch.Generator().manual_seed(0))
    found = mismatch_metrics(logp_T, logp_T, torch.zeros(100, dtype=torch.long), 1)
    for name in ("kl", "kl_v2", "k3_kl", "chi2_token", "chi2_seq", "is_weight_std", "logp_diff_abs_max"):
        assert found[PREFIX + name] == 0.0, name
    for name in ("ess", "raw_ess", "ppl_ratio", "is_weight_mean"):
        assert found[PREFIX + name] == 1.0, name
    assert found[PREFIX + "pearson"] == pytest.approx(1.0, abs=1e-12)


def test_a_mismatch_of_1e_6_is_not_lost_to_rounding():
    """float32 engines differ by 1e-6; the quadratic metrics are then 1e-12, below the rounding of 1."""
    train_T = torch.full((1000,), -1.0, dtype=torch.float64)
    sign_T = torch.where(torch.arange(1000) % 2 == 0, 1.0, -1.0).double()
    found = mismatch_metrics(train_T, train_T + 1e-6 * sign_T, torch.arange(1000) % 7, 7)
    assert found[PREFIX + "k3_kl"] == pytest.approx(5e-13, rel=1e-4)
    assert found[PREFIX + "kl_v2"] == pytest.approx(5e-13, rel=1e-6)
    assert found[PREFIX + "chi2_token"] == pytest.approx(2e-12, rel=1e-3)  # E[ρ²] − 1 = cosh(2e-6) − 1
    assert found[PREFIX + "raw_is_weight_std"] == pytest.approx(1e-6, rel=1e-4)


def test_no_tokens_gives_no_metrics():
    empty = torch.zeros(0)
    assert mismatch_metrics(empty, empty, empty.long(), 3) == {}
    assert noise_floor(empty, empty) == {}


def test_undefined_metrics_are_left_out():
    logp_T = torch.tensor([-0.005, -0.005])
    found = mismatch_metrics(logp_T, logp_T, torch.tensor([0, 0]), 1)
    absent = {"pearson", "kl_v1_unforced", "kl_v2_unforced", "stale_tokens_frac", "version_lag_mean", "version_lag_max"}
    assert not absent & {name.removeprefix(PREFIX) for name in found}
    assert found[PREFIX + "forced_token_ratio"] == 1.0
    assert all(math.isfinite(value) for value in found.values())


def test_metrics_of_logprobs_600_nats_apart_are_finite():
    found = mismatch_metrics(torch.tensor([-600.0, -0.1]), torch.tensor([-0.1, -600.0]), torch.tensor([0, 1]), 2)
    assert all(math.isfinite(value) for value in found.values())


def test_weight_removed_is_reported_by_the_length_of_the_rollout():
    long = LENGTH_BUCKETS[0] + 1
    ratio_T = torch.cat([torch.full((long,), 4.0), torch.tensor([4.0, 1.0])]).double()
    rollout_T = torch.cat([torch.zeros(long, dtype=torch.long), torch.ones(2, dtype=torch.long)])
    samp_T = torch.full_like(ratio_T, -5.0)
    result = correction_weights(samp_T + ratio_T.log(), samp_T, rollout_T, 2, mode="token_truncate", bounds=(0.0, 3.0))
    found = mismatch_metrics(samp_T + ratio_T.log(), samp_T, rollout_T, 2, correction=result)
    removed = {name: value for name, value in found.items() if "weight_removed" in name}
    assert removed == pytest.approx(
        {PREFIX + "weight_removed/len_1-64": 1 / 5, PREFIX + "weight_removed/len_65-256": 1 / 4}
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), mode=st.sampled_from(["token_mask", "sequence_truncate"]))
def test_metrics_do_not_depend_on_the_order_of_tokens(seed, mode):
    generator = torch.Generator().manual_seed(seed)
    num_tokens = 60
    rollout_T = torch.randint(9, (num_tokens,), generator=generator)
    samp_T = -3 * torch.rand(num_tokens, generator=generator)
    train_T = samp_T + 0.4 * torch.randn(num_tokens, generator=generator)
    version_T = torch.randint(-1, 4, (num_tokens,), generator=generator)

    def of(order_T: torch.Tensor) -> dict[str, float]:
        tokens = (train_T[order_T], samp_T[order_T], rollout_T[order_T])
        return mismatch_metrics(
            *tokens,
            10,
            correction=correction_weights(*tokens, 10, mode=mode, bounds=(0.8, 1.3)),
            version_T=version_T[order_T],
            current_version=4,
        )

    straight = of(torch.arange(num_tokens))
    assert of(torch.randperm(num_tokens, generator=generator)) == pytest.approx(straight, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("part_tokens", [1, 7, 60, 100])
def test_metrics_of_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, part_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rollout_T = torch.tensor([0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 4, 5, 5]).repeat_interleave(5)
    samp_T = -3 * torch.rand(len(rollout_T), generator=generator)
    train_T = samp_T + 0.4 * torch.randn(len(rollout_T), generator=generator)
    version_T = torch.full_like(rollout_T, UNKNOWN_VERSION)
    version_T[-3:] = torch.tensor([2, 3, 4])

    def of_parts(order_T: torch.Tensor) -> tuple[dict[str, float], list[int]]:
        tokens, counts = (train_T[order_T], samp_T[order_T], rollout_T[order_T]), []

        def backwards(count, work):
            counts.append(count)
            return [work(index) for index in reversed(range(count))][::-1]

        correction = correction_weights(*tokens, 7, mode="token_mask", bounds=(0.8, 1.3))
        options = {"correction": correction, "version_T": version_T[order_T], "current_version": 4}
        return mismatch_metrics(*tokens, 7, spread=backwards, **options), counts

    straight = torch.arange(len(rollout_T))
    (whole, one), _ = of_parts(straight), monkeypatch.setattr(mismatch, "PART_TOKENS", part_tokens)
    found, counts = of_parts(straight)
    assert found == pytest.approx(whole, rel=1e-12, abs=1e-15)
    assert (one, counts) == ([1], [{1: 4, 7: 4, 60: 2, 100: 1}[part_tokens]])
    assert of_parts(straight.flip(0))[0] == pytest.approx(whole, rel=1e-12, abs=1e-15)


def test_shares_of_tokens_are_not_rounded_twice() -> None:
    """Subtract no share from 1: 1 − 2/3 is another number than 1/3."""
    samp_T = torch.tensor([-1.0, -2.0, FORCED_LOGPROB])
    found = mismatch_metrics(samp_T, samp_T, torch.zeros(3, dtype=torch.int64), 1)
    assert found[PREFIX + "forced_token_ratio"] == 1 / 3


def test_perplexities_of_parts_may_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatch, "PART_TOKENS", 1)
    train_T = torch.full((2,), -709.5)
    found = mismatch_metrics(train_T, torch.full((2,), -1.0), torch.arange(2), 2)
    assert found[PREFIX + "training_ppl"] == math.inf


def test_noise_floor_is_the_divergence_of_two_scorings():
    first_T, second_T = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-0.9, -2.1], dtype=torch.float64)
    found = noise_floor(first_T, second_T)
    k3 = (math.exp(-0.1) + 0.1 - 1 + math.exp(0.1) - 0.1 - 1) / 2
    assert found == pytest.approx({PREFIX + "noise_floor_kl": 0.0, PREFIX + "noise_floor_k3": k3}, abs=1e-12)


HEALTHY = {
    PREFIX + "kl": 0.001,
    PREFIX + "ess": 0.99,
    PREFIX + "k3_kl": 4e-4,
    PREFIX + "noise_floor_k3": 4e-4,
    "rollout/token_match_rate": 1.0,
}


def test_a_healthy_step_raises_no_alarm():
    assert alarms(HEALTHY, AlarmThresholds()) == []
    assert alarms({}, AlarmThresholds()) == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (PREFIX + "kl", -0.11, "is 0.11, above 0.1"),
        (PREFIX + "ess", 0.29, "is 0.290, below 0.3"),
        (PREFIX + "k3_kl", 4.1e-3, "more than 10 times the trainer's own noise"),
        ("rollout/token_match_rate", 0.999, "tokens are trained that the engine did not sample"),
        (PREFIX + "kl", math.nan, "is nan"),
    ],
)
def test_each_alarm_names_its_metric_and_threshold(name, value, sentence):
    (alarm,) = alarms(HEALTHY | {name: value}, AlarmThresholds())
    assert sentence in alarm
    assert name in alarm


@pytest.mark.parametrize(
    ("metrics", "ends"),
    [
        ({}, ""),
        ({"k3_kl": 9e-8}, ""),
        ({"k3_kl": 2e-7}, "k3_kl between engine and trainer is 2e-07 .* above 1e-07"),
        ({"k3_kl": 2e-7, "noise_floor_k3": 1e-8}, ""),
        ({"k3_kl": 2e-7, "quantization_k3": 1e-8}, ""),
        ({"k3_kl": 2e-7, "version_lag_max": 1.0}, ""),
        ({"k3_kl": 0.0, "kl": -0.2}, r"\|kl\| between engine and trainer is 0.2 .* above 0.1"),
        ({"kl": 0.2, "version_lag_max": 1.0}, ""),
    ],
)
def test_only_a_disagreement_far_beyond_rounding_ends_a_run(metrics, ends):
    sentence = disagreement({f"rollout_correction/{name}": value for name, value in metrics.items()}, AlarmThresholds())
    assert (sentence is None) is (not ends)
    assert re.search(ends, sentence or "")


def test_an_infinite_threshold_turns_an_alarm_off_over_any_floor():
    off = AlarmThresholds(k3_over_noise_floor=math.inf)
    for floor in (0.0, 1e-12, math.nan):
        metrics = {PREFIX + "k3_kl": 1.0, PREFIX + "noise_floor_k3": floor}
        assert alarms(metrics, off) == []
        assert disagreement(metrics, off) is None


def test_what_quantization_costs_is_the_floor_of_its_alarm():
    quantized = HEALTHY | {QUANTIZATION_K3: 2e-3}
    assert alarms(quantized | {PREFIX + "k3_kl": 1.9e-2}, AlarmThresholds()) == []
    (alarm,) = alarms(quantized | {PREFIX + "k3_kl": 2.1e-2}, AlarmThresholds())
    assert "k3_kl is 0.021, more than 10 times the cost of quantization in the first update of 0.002" in alarm
    assert "sync/canary_abs_diff" in alarm


def test_equal_rewards_of_a_whole_step_raise_an_alarm():
    (alarm,) = alarms(HEALTHY | {"reward/mean": 0.0, "reward/std": 0.0}, AlarmThresholds())
    assert alarm.startswith("reward/std is 0: every rollout of this step has the reward 0")
    assert alarms(HEALTHY | {"reward/mean": 0.5, "reward/std": 0.5}, AlarmThresholds()) == []


@pytest.mark.parametrize("flat", [{"reward/mean": 0.0, "reward/std": 0.0}, {"reward/zero_std_fraction": 1.0}])
def test_equal_rewards_of_rollouts_that_are_cut_off_name_the_limit_first(flat):
    cut = HEALTHY | flat | {"rollout/truncated_fraction": 0.9, "rollout/context_full_fraction": 0.04}
    (alarm,) = alarms(cut, AlarmThresholds())
    end = (
        "better than another. 94% of the rollouts are cut off before their end: raise rollout.max_tokens_per_turn and "
    )
    assert end + "rollout.max_model_len." in alarm
    (alarm,) = alarms(
        cut | {"rollout/truncated_fraction": 0.0, "rollout/context_full_fraction": 0.6}, AlarmThresholds()
    )
    assert "60% of the rollouts are cut off before their end: raise rollout.max_model_len." in alarm
    (alarm,) = alarms(cut | {"rollout/truncated_fraction": 0.4}, AlarmThresholds())
    assert "cut off" not in alarm


def test_an_alarm_says_that_most_tool_calls_fail_and_why():
    tools = {"environment/tool_calls": 0.64, "environment/tool_errors": 0.48}
    faults = {"environment/tool_errors_malformed": 0.12, "environment/tool_errors_exception": 0.36}
    (alarm,) = alarms(HEALTHY | tools | faults, AlarmThresholds())
    assert alarm.startswith(
        "environment/tool_errors is 0.48 of 0.64 calls per rollout: most tool calls fail (exception"
    )
    assert "(exception 75%, malformed 25%)" in alarm
    first, second = alarms(HEALTHY | tools | faults | {"reward/mean": 0.0, "reward/std": 0.0}, AlarmThresholds())
    assert first == alarm
    assert "another. Mend the tools first" in second
    for calls in ({"environment/tool_calls": 0.96}, {"environment/tool_calls": math.nan}, {}):
        assert alarms(HEALTHY | {"environment/tool_errors": 0.48} | faults | calls, AlarmThresholds()) == []


def test_a_step_whose_rollouts_are_all_solved_raises_no_alarm_but_a_note():
    solved = HEALTHY | {"reward/mean": 1.0, "reward/std": 0.0, "reward/zero_std_fraction": 1.0}
    assert alarms(solved, AlarmThresholds()) == []
    (note,) = notes(solved, AlarmThresholds())
    assert "all rollouts of this step are solved" in note
    assert "Harder data" in note
    for failed, thresholds in ((solved | {"reward/mean": 0.2}, {}), (solved, {"solved": 1.5})):
        (alarm,) = alarms(failed, AlarmThresholds(**thresholds))
        assert "task is too hard for the model, or the reward does not recognize right answers" in alarm
        assert notes(failed, AlarmThresholds(**thresholds)) == []
    assert AlarmThresholds.of({"eval.pass_threshold": 0.5}.get).solved == 0.5


def test_a_share_of_failed_rollouts_raises_an_alarm_with_their_causes():
    lost = HEALTHY | {"rollout/dropped_reward": 8.0, "rollout/dropped_engine": 0.0, "rollout/dropped_filtered": 16.0}
    (alarm,) = alarms(lost | {"rollout/dropped_fraction": 0.125}, AlarmThresholds())
    assert alarm.startswith("rollout/dropped_fraction is 0.125, above 0.05: rollouts of this step fail (reward 8,")
    assert alarms(lost | {"rollout/dropped_fraction": 0.05}, AlarmThresholds()) == []


def test_equal_rewards_within_every_group_raise_an_alarm_unless_a_teacher_is_the_signal():
    flat = HEALTHY | {"reward/std": 0.4, "reward/zero_std_fraction": 1.0, "policy/entropy": 0.005}
    (alarm,) = alarms(flat, AlarmThresholds())
    assert alarm.startswith("reward/zero_std_fraction is 1: the rollouts of each prompt have equal rewards")
    assert "policy/entropy 0.005" in alarm
    assert alarms(flat | {"reward/zero_std_fraction": 0.99}, AlarmThresholds()) == []
    assert alarms(flat | {"teacher/kl": 0.1}, AlarmThresholds()) == []
    assert len(alarms(flat | {"reward/std": 0.0}, AlarmThresholds())) == 1


def test_prompts_that_are_all_solved_with_other_rewards_raise_no_alarm_but_a_note():
    flat = HEALTHY | {"reward/mean": 1.2, "reward/std": 0.2, "reward/zero_std_fraction": 1.0}
    solved = flat | {"reward/flat_solved_fraction": 1.0, "reward/flat_failed_fraction": 0.0}
    assert alarms(solved, AlarmThresholds()) == []
    assert "Harder data" in notes(solved, AlarmThresholds())[0]
    half = flat | {"reward/flat_solved_fraction": 0.5, "reward/flat_failed_fraction": 0.5}
    assert len(alarms(half, AlarmThresholds())) == 1
    assert notes(half, AlarmThresholds()) == []


def test_stale_tokens_have_no_noise_alarm_and_their_kl_alarm_names_the_staleness():
    stale = HEALTHY | {PREFIX + "version_lag_max": 2.0}
    assert alarms(stale | {PREFIX + "k3_kl": 4.1e-3}, AlarmThresholds()) == []
    (alarm,) = alarms(stale | {PREFIX + "kl": 0.11}, AlarmThresholds())
    assert "rollout.max_staleness" in alarm


def test_quantization_cost_is_the_divergence_from_the_unquantized_policy():
    samp_T, train_T = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.8, -0.5])
    ratio_T = (train_T.double() - samp_T.double()).exp()
    found = quantization_cost(train_T, samp_T)
    assert found[QUANTIZATION_K3] == pytest.approx(float((ratio_T - 1 - ratio_T.log()).mean()), abs=1e-6)
    assert found[PREFIX + "quantization_ess"] == pytest.approx(
        float(ratio_T.mean() ** 2 / (ratio_T**2).mean()), abs=1e-6
    )
    assert quantization_cost(train_T[:0], samp_T[:0]) == {}
