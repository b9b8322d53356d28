"""Causes planted in dumps: each is named, at the rounding of float32 and of bfloat16; and what a dump cannot tell."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from lockstep.lab.diagnosis.causes import Severity
from lockstep.lab.dumps.decision_tree import TREE, Cause, judge
from lockstep.lab.dumps.dump_rows import Dump, DumpRow
from lockstep.lab.dumps.examine import severity, to_json
from lockstep.lab.dumps.measures import Measures
from tests.fixtures.paths import ROOT
from tests.unit.lab.dumps.planted import PROMPT, Planted, planted

FLOAT32, BFLOAT16, ROUGH = 3e-4, 0.014, 0.03


def measures(dump: Planted, change: Callable[[np.ndarray, np.ndarray], object] = lambda *_: None) -> Measures:
    """change: of the sampling and training logprobs of each row."""
    rows = []
    for number, length in enumerate(dump.lengths.tolist()):
        sampling, training = dump.sampling[number, :length].copy(), dump.training[number, :length].copy()
        change(sampling, training)
        mask = [0] * PROMPT + [1] * length
        ids = dump.ids[number, : PROMPT + length].tolist()
        rows.append(
            DumpRow.of(f"row {number}", ids=ids, is_trained=mask, sampling=list(sampling), training=list(training))
        )
    return Measures(dump=Dump(format="a test", rows=tuple(rows)))


@pytest.mark.parametrize("rounding", [FLOAT32, BFLOAT16, ROUGH])
@pytest.mark.parametrize(
    "cause",
    ["none", "wrong_mask", "shift", "retokenise", "padding", "truncated_support", "temperature", "stale_weights"],
)
def test_a_planted_cause_is_named(cause: str, rounding: float) -> None:
    expected = "dtype" if cause == "none" and rounding > FLOAT32 else cause
    found = [str(judge(measures(planted(cause, seed=seed, rounding=rounding))).cause) for seed in range(4)]
    assert found == [expected] * 4


def _positive(sampling: np.ndarray, training: np.ndarray) -> None:
    training *= -1


def _unscored(sampling: np.ndarray, training: np.ndarray) -> None:
    training[:] = 0


def _unwritten(sampling: np.ndarray, training: np.ndarray) -> None:
    training[3] = np.nan


def _copied(sampling: np.ndarray, training: np.ndarray) -> None:
    training[:] = sampling


def _unsampled(sampling: np.ndarray, training: np.ndarray) -> None:
    sampling[4] = np.nan


def _penalized(sampling: np.ndarray, training: np.ndarray) -> None:
    sampling[::2] -= 1.5


@pytest.mark.parametrize(
    ("change", "cause", "evidence"),
    [
        (_positive, Cause.INVALID, "logprobs are above 0"),
        (_unscored, Cause.NOT_SCORED, "training logprobs are 0"),
        (_unwritten, Cause.NOT_SCORED, "48 of "),
        (_copied, Cause.COPIED, "bit for bit"),
        (_unsampled, Cause.WRONG_MASK, "48 of "),
        (_penalized, Cause.UNKNOWN, "and 1 for any two policies"),
    ],
)
def test_numbers_that_are_no_pair_of_logprobs_are_named(
    change: Callable[[np.ndarray, np.ndarray], None], cause: Cause, evidence: str
) -> None:
    found = measures(planted("none", seed=0, rounding=FLOAT32), change)
    verdict = judge(found)
    assert (verdict.cause, evidence in verdict.evidence) == (cause, True), verdict.evidence
    assert np.isfinite([found.kl_v1, found.kl_v2, *found.ratio]).all(), "tokens without a logprob are left out"
    assert json.loads(json.dumps(to_json(found, verdict, Severity.CRITICAL, None), allow_nan=False))["cause"] == cause


def test_what_the_dump_leaves_open_is_said() -> None:
    rounded = judge(measures(planted("none", seed=0, rounding=BFLOAT16))).cannot_tell
    assert rounded[0].startswith("weights that are a little old from rounding")
    assert any("temperature" in sentence for sentence in rounded)
    equal = planted("none", seed=0, rounding=BFLOAT16)
    equal.lengths[:] = 5
    left = judge(measures(equal)).cannot_tell
    assert "padding: all rows are equally long" in left
    assert any(f"there are {5 * len(equal.lengths)} trained tokens" in sentence for sentence in left)
    agreed = judge(measures(planted("none", seed=0, rounding=FLOAT32))).cannot_tell
    assert agreed == ()


def test_rows_at_two_versions_tell_retokenized_turns_from_changed_weights() -> None:
    found = measures(planted("retokenise", seed=0, rounding=FLOAT32))
    assert any("weights that changed" in sentence for sentence in judge(found).cannot_tell)


def test_the_page_asks_the_questions_of_the_tree_in_order() -> None:
    page = (ROOT / "docs" / "kl.md").read_text()
    places = [page.find(question.asks) for question in TREE]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.SHIFT, Severity.CRITICAL),
        (Cause.TEMPERATURE, Severity.WARNING),
        (Cause.COPIED, Severity.WARNING),
        (Cause.DTYPE, Severity.OK),
        (Cause.STALE, Severity.OK),
        (Cause.NONE, Severity.OK),
    ],
)
def test_a_fault_is_never_ok_however_small_its_divergence(cause: Cause, expected: Severity) -> None:
    assert severity(cause, kl_v1=1e-5, kl_v2=1e-5) is expected
    assert severity(cause, kl_v1=1e-5, kl_v2=0.2) is Severity.CRITICAL
