"""Positions of a case whose whole distributions are compared, and what is reported about them."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from lockstep.lab.diagnosis.case_distributions import SPREAD, WORST, CaseDistributions
from lockstep.lab.diagnosis.causes import Cause, Severity
from lockstep.lab.diagnosis.diagnosis import print_diagnosis
from lockstep.lab.diagnosis.evidence import ScoredTokens
from lockstep.lab.diagnosis.whole_case import choose, prefix
from lockstep.lab.pages.token_view import token_view
from lockstep.rollout.errors import EngineError
from lockstep.rollout.records import SamplingSupport
from lockstep.rollout.weights.whole.distributions import Bound, WholeResult, distances
from tests.fixtures.made_up_model import FakeEngine, FakeTrainer, examine, scored_tokens, two_turns

VOCAB, TOKEN = 300, 65
ROLLOUTS = [two_turns(i, said="the answer is 42 " * (1 + 3 * i)) for i in range(3)]


def scored(**changes: float) -> ScoredTokens:
    """Tokens of three rows, the second of which has the worst position unless `at` names another."""
    tokens = scored_tokens(ROLLOUTS, FakeTrainer())
    train_N = tokens.train_N.clone()
    for n, change in changes.items():
        train_N[int(n[1:])] += change
    return replace(tokens, train_N=train_N)


def compared(logits_nV: Tensor, other_nV: Tensor, *, bound: Bound | None) -> CaseDistributions:
    n = len(logits_nV)
    return CaseDistributions(
        rollout_id=7,
        positions=tuple(range(4, 4 + n)),
        ids=tuple(range(n)),
        whole=WholeResult(
            engine_NV=logits_nV,
            trainer_NV=other_nV,
            distance=distances(logits_nV, other_nV),
            bound=bound,
            num_bytes=4 * n * VOCAB,
        ),
    )


def test_the_row_of_the_worst_token_gives_its_worst_and_spread_positions() -> None:
    tokens = scored()
    own_N = (tokens.row_N == 1).nonzero().flatten()
    worst = own_N[3 : 3 + WORST].tolist()
    row, positions = choose(scored(**{f"n{n}": -1.0 for n in worst}), limit=512)
    assert row is tokens.batch.rows[1] or row.rollout_id == 1
    assert set(tokens.position_N[worst].tolist()) <= set(positions)
    assert WORST + 2 <= len(positions) <= WORST + SPREAD
    assert {positions[0], positions[-1]} == set(tokens.position_N[own_N[[0, -1]]].tolist())
    assert all(row.loss_mask[list(positions)])


def test_positions_behind_the_limit_are_left_out() -> None:
    tokens = scored()
    last = int((tokens.row_N == 2).nonzero().flatten()[-1])
    limit = int(tokens.position_N[last])
    row, positions = choose(scored(**{f"n{last}": -9.0, "n3": -1.0}), limit=limit)
    assert row.rollout_id == 0, "the worst token is behind the limit"
    assert max(positions) < limit
    assert choose(tokens, limit=1)[1] == ()


def test_a_prefix_ends_at_its_last_position_and_has_no_support() -> None:
    row = scored().batch.rows[1]
    count = row.num_trained
    support = SamplingSupport(offsets=np.arange(count + 1), token_ids=row.ids[row.loss_mask])
    trained = np.flatnonzero(row.loss_mask)[[1, 4]].tolist()
    part = prefix(replace(row, support=support, routes=np.zeros((len(row), 1, 2), np.uint8)), trained)
    assert len(part) == trained[-1] + 1
    assert np.flatnonzero(part.loss_mask).tolist() == trained
    assert part.support is None
    assert part.routes is not None
    assert len(part.routes) == len(part)


def tables() -> tuple[Tensor, Tensor]:
    table = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    other = table.clone()
    other[:, TOKEN] += 0.5
    return table, other


def test_a_token_that_moves_is_a_warning_although_the_sampled_tokens_agree() -> None:
    whole = compared(*tables(), bound=Bound(kl=1e-6, move=1e-3))
    diagnosis = examine(ROLLOUTS, FakeTrainer(), engine=FakeEngine(), whole=lambda tokens: whole)
    assert (diagnosis.finding.severity, diagnosis.finding.cause) == (Severity.WARNING, Cause.UNKNOWN)
    assert f"log p of token {TOKEN} by 0.5, rounding explains 0.001" in diagnosis.finding.explanation
    report = json.loads(json.dumps(diagnosis.to_json(), allow_nan=False))["cases"][0]["distributions"]
    assert report["moved"][0] | {"text": ""} == {
        "token_id": TOKEN,
        "text": "",
        "position": report["moved"][0]["position"],
        "logp_engine": report["moved"][0]["logp_engine"],
        "logp_trainer": pytest.approx(report["moved"][0]["logp_engine"] + 0.5, abs=0.01),
    }
    assert [row["moved"][0]["token_id"] for row in report["positions"]] == [TOKEN] * 6
    assert report["kl_limit"] == 1e-6
    console = Console(file=io.StringIO(), width=300)
    print_diagnosis(diagnosis, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "temperature 1, before masks" in printed
    assert f"moves most for  {TOKEN} " in printed
    page = token_view(diagnosis)
    assert "Distributions over the vocabulary" in page
    assert f"{TOKEN}: " in page


def test_distributions_within_rounding_or_of_quantized_engines_are_ok() -> None:
    for bound in (Bound(kl=1.0, move=0.6), None):
        whole = compared(*tables(), bound=bound)
        assert (
            examine(ROLLOUTS, FakeTrainer(), engine=FakeEngine(), whole=lambda _, one=whole: one).finding.cause is None
        )


def test_numbers_that_are_not_finite_are_null_and_a_warning() -> None:
    table, other = tables()
    table[2, 5] = torch.nan
    whole = compared(table, other, bound=Bound(kl=1e9, move=1e9))
    assert whole.whole.is_wrong
    assert whole.to_json(str)["positions"][2]["kl"] is None


def test_an_engine_that_cannot_send_them_is_a_note() -> None:
    def fail(tokens: ScoredTokens) -> CaseDistributions:
        raise EngineError("no such method")

    diagnosis = examine(ROLLOUTS, FakeTrainer(), engine=FakeEngine(), whole=fail)
    assert diagnosis.cases[0].note.endswith("distributions were not compared: no such method")
    assert diagnosis.to_json()["cases"][0]["distributions"] is None
