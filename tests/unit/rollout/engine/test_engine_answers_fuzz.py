"""Fuzzed answers of a server and requests to its compact route are read, or refused with a Lockstep error."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.rollout.engine.engine_answers import FIRST_LABEL, Answer, engine_call, version_number
from lockstep.rollout.errors import ConfigError, EngineError, EvidenceError
from lockstep.rollout.server.client import read_json
from lockstep.rollout.server.generate_route import encode_answer
from lockstep.rollout.server.server_engine import read_answer, read_checksums, read_facts, read_label, read_scores
from tests.fixtures.fake_server import SERVER_INFO, completion
from tests.fixtures.mutations import JSON, mutated
from tests.unit.rollout.server.test_generate_route import BODY, Engine, answer

WITH_SUPPORT = completion((7,), logprobs={"content": [{"token_id": 7, "logprob": 0.0, "top_logprobs": [
    {"token_id": 7, "logprob": -0.6931472}, {"token_id": 9, "logprob": -0.6931472}]}]})  # fmt: skip
SCORES = {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0}}]}
COMPACT = encode_answer(
    Answer(
        sampled_ids=[7, 8], candidate_ids=[7, 8], candidate_logprobs=[-1.5, -0.1], starts=[0, 1], finish_reason="stop",
        versions=[("default", 0, 2)],
    )
)  # fmt: skip
BASE64 = st.binary(max_size=12).map(lambda raw: base64.b64encode(raw).decode())


@settings(max_examples=400)
@given(reply=mutated(completion()) | mutated(WITH_SUPPORT) | JSON, with_support=st.booleans())
def test_a_completion_is_valid_evidence_or_refused(reply: Any, with_support: bool) -> None:
    with contextlib.suppress(EvidenceError, EngineError):
        read = read_answer(reply, with_support=with_support, source="s")
        call = engine_call((5, 6), read, with_support=with_support, max_tokens=8, vocab_size=512, source="s")
        assert len(call.sampled_ids) == len(call.sampled_logprobs)


@settings(max_examples=400)
@given(
    reply=mutated(COMPACT)
    | st.builds(lambda key, value: {**COMPACT, key: value}, st.sampled_from(sorted(COMPACT)), BASE64)
    | JSON,
    with_support=st.booleans(),
)
def test_a_compact_completion_is_valid_evidence_or_refused(reply: Any, with_support: bool) -> None:
    with contextlib.suppress(EvidenceError, EngineError):
        call = engine_call(
            (5, 6),
            read_answer(reply, with_support=with_support, source="s", is_compact=True),
            with_support=with_support,
            max_tokens=8,
            vocab_size=512,
            source="s",
        )
        assert len(call.sampled_ids) == len(call.sampled_logprobs)


@settings(max_examples=200)
@given(reply=mutated(SCORES) | JSON)
def test_scores_are_read_or_refused(reply: Any) -> None:
    with contextlib.suppress(EvidenceError):
        assert len(read_scores(reply, (5, 6, 7), source="s")) == 2


@settings(max_examples=200)
@given(reply=mutated(SERVER_INFO) | JSON)
def test_a_server_description_is_read_or_refused(reply: Any) -> None:
    with contextlib.suppress(ConfigError):
        assert read_facts("http://127.0.0.1:1", reply).max_model_len == 64


@settings(max_examples=100)
@given(reply=mutated({"weight_version": "4"}) | mutated({"checksums": {"a": "b"}}) | JSON)
def test_a_version_and_checksums_are_read_or_refused(reply: Any) -> None:
    with contextlib.suppress(EngineError):
        label = read_label(reply, source="s")
        assert version_number(label, source="s") == (0 if label == FIRST_LABEL else int(reply["weight_version"]))
    with contextlib.suppress(EngineError):
        found = read_checksums(reply, source="s")
        assert found == {name: str(checksum) for name, checksum in reply["checksums"].items()}


@settings(max_examples=100)
@given(raw=st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
@example(raw=b"[" * 100_000)
def test_bytes_are_json_or_refused(raw: bytes) -> None:
    try:
        expected = json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        with pytest.raises(EvidenceError, match=f"s answered {len(raw)} bytes that are not JSON"):
            read_json(raw, source="s")
    else:
        assert repr(read_json(raw, source="s")) == repr(expected)  # NaN is not equal to itself


@settings(max_examples=150)
@given(raw=mutated(BODY).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=30))
@example(raw=b"[" * 100_000)
@example(raw=b'{"token_ids": [5], "sampling_params": {"max_tokens": 1e400}}')
def test_an_invalid_request_to_the_compact_route_gets_400(raw: bytes) -> None:
    """A 500 would be retried, and would mean that the engine failed."""
    status, fields = asyncio.run(answer(Engine(), raw))
    assert status in (200, 400), fields


@pytest.mark.parametrize("label", ["", "4.5", "half-loaded-5", "9" * 5000])
def test_a_label_that_is_not_a_version_is_refused(label: str) -> None:
    with pytest.raises(EngineError, match="expected a number"):
        version_number(label, source="s")
