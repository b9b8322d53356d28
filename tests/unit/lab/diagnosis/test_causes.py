"""Severity by thresholds and by the record, and the precedence of causes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.lab.diagnosis.causes import VARIANTS, Cause, Severity, judge, severity_of
from lockstep.lab.diagnosis.evidence import EngineCheck, Evidence, TokenMatch

EXACT = TokenMatch(sampled=10, trained=10, same_id=10, same=10)
BAD = {"kl_v1": 0.5, "kl_v2": 0.5}
OFFSETS = {-1: 0.9, 0: 1.0, 1: 0.9}


def engine(*, record_vs_trainer: float, engine_vs_trainer: float) -> EngineCheck:
    return EngineCheck(
        tokens=5, record_vs_trainer=record_vs_trainer, engine_vs_trainer=engine_vs_trainer, engine_vs_record=None
    )


class TestSeverity:
    @pytest.mark.parametrize("metric", ["kl_v1", "kl_v2"])
    @pytest.mark.parametrize(
        ("kl", "expected"),
        [
            (0.0, Severity.OK),
            (0.0099, Severity.OK),
            (0.011, Severity.WARNING),
            (0.0999, Severity.WARNING),
            (0.11, Severity.CRITICAL),
            (float("nan"), Severity.CRITICAL),
        ],
    )
    def test_thresholds_are_a_hundredth_and_a_tenth_of_a_nat(self, metric, kl, expected):
        assert severity_of({metric: kl}) is expected

    def test_a_mismatch_that_cancels_in_kl_v1_is_still_seen(self):
        finding = judge(Evidence(match=EXACT, mismatch={"kl_v1": 0.0, "kl_v2": 0.5}))
        assert finding.severity is Severity.CRITICAL

    def test_a_negative_kl_v1_counts_like_a_positive_one(self):
        finding = judge(Evidence(match=EXACT, mismatch={"kl_v1": -0.05, "kl_v2": 0.0}))
        assert finding.severity is Severity.WARNING

    def test_rows_that_contradict_the_record_are_critical_without_any_divergence(self):
        lost = TokenMatch(sampled=10, trained=9, same_id=9, same=9, lost_ends=1)
        finding = judge(Evidence(match=lost, mismatch={"kl_v1": 0.0, "kl_v2": 0.0}))
        assert (finding.severity, finding.cause) == (Severity.CRITICAL, Cause.MISSING_FINAL)
        assert "at the end of turns" in finding.explanation

    def test_a_trainer_that_contradicts_itself_is_seen_even_if_its_mean_agrees(self):
        finding = judge(Evidence(match=EXACT, mismatch={"kl_v1": 0.0, "kl_v2": 0.005}, noise={"kl_v2": 0.02}))
        assert (finding.severity, finding.cause) == (Severity.WARNING, Cause.DROPOUT)

    def test_nothing_measured_is_ok(self):
        nothing = TokenMatch(sampled=0, trained=0, same_id=0, same=0)
        finding = judge(Evidence(match=nothing, mismatch={}))
        assert (finding.severity, finding.cause) == (Severity.OK, None)


class TestCauses:
    def test_wrong_ids_are_named_before_everything_that_follows_from_them(self):
        wrong = TokenMatch(sampled=10, trained=8, same_id=3, same=3)
        shifted = {-1: 1.0, 0: 1.0, 1: 0.0}
        found = Evidence(match=wrong, mismatch=BAD, noise={"kl_v2": 9.0}, abs_diff_by_offset=shifted)
        assert judge(found).cause is Cause.RETOKENIZE

    @pytest.mark.parametrize(("offset", "side"), [(1, "late"), (-1, "early")])
    def test_a_shift_says_to_which_side(self, offset, side):
        finding = judge(Evidence(match=EXACT, mismatch=BAD, abs_diff_by_offset=OFFSETS | {offset: 0.4}))
        assert finding.cause is Cause.SHIFT
        assert f"one position {side}" in finding.explanation

    def test_a_neighbor_that_fits_only_a_little_better_is_not_a_shift(self):
        finding = judge(Evidence(match=EXACT, mismatch=BAD, abs_diff_by_offset=OFFSETS | {1: 0.6}))
        assert finding.cause is Cause.STALE_ROLLOUTS

    def test_replaced_logprobs_with_the_right_ids_have_no_known_cause(self):
        wrong = TokenMatch(sampled=10, trained=10, same_id=10, same=4)
        check = engine(record_vs_trainer=0.5, engine_vs_trainer=0.5)
        assert judge(Evidence(match=wrong, mismatch=BAD, engine=check)).cause is Cause.UNKNOWN

    @pytest.mark.parametrize(("now", "cause"), [(0.3, Cause.STALE_WEIGHTS), (0.2, Cause.STALE_ROLLOUTS)])
    def test_the_engine_is_stale_if_it_keeps_more_than_half_of_the_disagreement(self, now, cause):
        check = engine(record_vs_trainer=0.5, engine_vs_trainer=now)
        assert judge(Evidence(match=EXACT, mismatch=BAD, engine=check)).cause is cause


def test_the_command_line_learns_the_variants_without_torch():
    code = "import sys, lockstep.lab.diagnosis.causes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert [str(variant) for variant in VARIANTS] == [
        *("retokenise", "missing_final", "shift", "dropout", "stale_weights")
    ]
