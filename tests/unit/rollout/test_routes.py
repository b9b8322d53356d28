"""Routed experts of calls: checked, shared between turns, in rows and branches, in files and between processes."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from lockstep.rollout.engine.engine_answers import Answer, engine_call
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import DataError, EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, Routes
from lockstep.rollout.saved_rollouts import (
    from_json,
    read_rollouts,
    to_json,
    write_rollouts,
)
from lockstep.rollout.server.generate_route import decode_answer, encode_answer
from tests.fixtures.calls import a_call, call_trees

LAYERS, K = 3, 2


def experts(length: int, value: int) -> np.ndarray:
    """Return routes that name their call (`value`) and token."""
    tokens = np.arange(length, dtype=np.uint8)[:, None, None]
    return np.concatenate([np.full((length, LAYERS, 1), value, np.uint8), tokens.repeat(LAYERS, 1)], 2)


def routed(prompt: Sequence[int], sampled: Sequence[int], value: int) -> EngineCall:
    call = a_call(prompt, sampled)
    return replace(call, routes=Routes(own=experts(len(prompt) + len(sampled) - 1, value)))


def a_rollout(calls: Sequence[EngineCall]) -> Rollout:
    return Rollout(rollout_id=0, group_id=0, calls=tuple(calls))


FIRST = routed([1, 2], [3, 4], 1)
SECOND = routed([1, 2, 3, 4, 5], [6], 2)
BRANCH = routed([1, 2, 3, 4, 9], [7, 8], 3)


def of_calls(routes: np.ndarray | None) -> list[int]:
    """Return the call that each token of a row has its experts from."""
    assert routes is not None
    assert (routes[:, :, 1] == np.arange(len(routes))[:, None]).all(), "tokens out of place"
    return routes[:, 0, 0].tolist()


@pytest.mark.parametrize("shares", [True, False])
def test_a_token_of_a_row_has_the_experts_of_the_call_that_sampled_after_it(shares: bool) -> None:
    calls = [FIRST, SECOND, BRANCH]
    rows = rows_from_calls(a_rollout(calls).calls if shares else calls)
    # Token 4 is the last one of the first call, which did not compute it.
    assert [of_calls(row.routes) for row in rows] == [[1, 1, 1, 2, 2], [1, 1, 1, 3, 3, 3]]


def test_a_rollout_stores_equal_experts_of_a_token_once() -> None:
    """The later calls agree with the first on what it computed, as with the engine's prefix cache; not on token 4."""
    cached = experts(3, 1)
    calls = [FIRST]
    for call in (SECOND, BRANCH):
        assert call.routes is not None
        calls.append(replace(call, routes=Routes(own=np.concatenate([cached, call.routes.own[3:]]))))
    rollout = a_rollout(calls)
    found = [call.routes for call in rollout.calls if call.routes is not None]
    assert [len(routes.own) for routes in found] == [3, 2, 3]
    assert all(routes.own.base is None for routes in found), "a view would keep the whole array of the engine"
    assert [of_calls(routes.whole) for routes in found] == [[1, 1, 1], [1, 1, 1, 2, 2], [1, 1, 1, 3, 3, 3]]
    assert [len(routes.own) for call in a_rollout([FIRST, SECOND]).calls if (routes := call.routes)] == [3, 5]


@given(call_trees())
@settings(max_examples=200, deadline=None)
def test_every_row_has_all_its_experts_but_the_last(calls: list[EngineCall]) -> None:
    given_routes = [
        replace(call, routes=Routes(own=experts(len(call.prompt) + len(call.sampled_ids) - 1, index)))
        for index, call in enumerate(calls)
    ]
    for shared in (given_routes, a_rollout(given_routes).calls):
        for row in rows_from_calls(shared):
            assert len(of_calls(row.routes)) == len(row) - 1


def test_files_keep_routes(tmp_path: Path) -> None:
    rollout = a_rollout([FIRST, SECOND, BRANCH])
    write_rollouts(tmp_path / "r.jsonl", [rollout])
    (read,) = read_rollouts(tmp_path / "r.jsonl")
    copies = [read, from_json(json.loads(json.dumps(to_json(rollout)))), copy.deepcopy(rollout)]
    for made in copies:
        for call, expected in zip(made.calls, rollout.calls, strict=True):
            assert call.routes is not None
            assert expected.routes is not None
            assert np.array_equal(call.routes.whole, expected.routes.whole)
            assert call.routes.own.dtype == np.uint8


def test_files_hold_routes_compactly(tmp_path: Path) -> None:
    """Eight of 64 experts, drawn alike in 16 layers: 44 bits of choice take at most 8 bytes and base64's third."""
    length, rng = 2000, np.random.default_rng(0)
    chosen = np.argsort(rng.random((length, 16, 64)), axis=-1)[..., :8].astype(np.uint8)
    call = a_call(range(1, length), [5, 6])
    sizes = []
    for one in (call, replace(call, routes=Routes(own=chosen))):
        write_rollouts(tmp_path / "r.jsonl", [a_rollout([one])])
        sizes.append((tmp_path / "r.jsonl").stat().st_size)
    assert (sizes[1] - sizes[0]) / length <= 16 * 8 * 4 / 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": [2, 3, 2]}, "bytes, expected 12"),
        ({"shape": [5, 3, 2]}, "bytes, expected 30"),
        ({"shape": [3, 6]}, "expected unsigned integers of shape"),
        ({"shape": [3, -3, 2]}, "negative routes shape"),
        ({"dtype": "int8"}, "expected unsigned integers"),
        ({"data": "AAAA"}, "cannot be decompressed"),
        ({"shared": 1}, "1 tokens of a call that has 0"),
    ],
)
def test_damaged_routes_in_a_file_are_refused(tmp_path: Path, change: dict[str, object], text: str) -> None:
    data = to_json(a_rollout([FIRST]))
    data["calls"][0]["routes"] |= change
    (tmp_path / "r.jsonl").write_text(json.dumps(data))
    with pytest.raises((DataError, EvidenceError), match=text):
        list(read_rollouts(tmp_path / "r.jsonl"))


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(EvidenceError, match="routed experts of 4 tokens, expected 3: those of the prompt and of all"):
        replace(FIRST, routes=Routes(own=experts(4, 1)))
    with pytest.raises(EvidenceError, match="int64 of shape"):
        Routes(own=np.zeros((3, LAYERS, K), dtype=np.int64))


def answer(routes: np.ndarray | None) -> Answer:
    return Answer(
        sampled_ids=[3, 4],
        candidate_ids=[3, 4],
        candidate_logprobs=[-0.5, -0.25],
        starts=[0, 1],
        finish_reason="stop",
        versions=[("1", 0, 2)],
        routes=routes,
    )


def test_an_answer_has_routes_if_asked_for() -> None:
    told = {"with_support": False, "max_tokens": 4, "vocab_size": 10, "source": "the engine"}
    read = decode_answer(json.loads(json.dumps(encode_answer(answer(experts(3, 1))))))
    call = engine_call((1, 2), read, with_routes=True, **told)
    assert call.routes is not None
    assert of_calls(call.routes.whole) == [1, 1, 1]
    assert engine_call((1, 2), read, **told).routes is None
    without = decode_answer(encode_answer(answer(None)))
    assert engine_call((1, 2), without, **told).finish_reason is FinishReason.STOP
    with pytest.raises(EvidenceError, match="start it with --enable-return-routed-experts"):
        engine_call((1, 2), without, with_routes=True, **told)
