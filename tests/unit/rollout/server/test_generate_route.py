"""Compact generate route of a server, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs

from lockstep.rollout.server.generate_route import ROUTE, CompactGenerate, decode_answer, decode_scores

BODY = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 0, "seed": 3, "flat_logprobs": True}}


def completion() -> SimpleNamespace:
    flat = FlatLogprobs()
    for token, logprob in ((7, -1.5), (8, float("-inf"))):
        flat.append_fast([token], [logprob], iter([1]), [None])  # type: ignore[arg-type]
    span = SimpleNamespace(version="4", start=0, end=2)
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    return SimpleNamespace(
        token_ids=[7, 8], logprobs=flat, finish_reason="length", weight_versions=[span], routed_experts=routes
    )


def scored() -> FlatLogprobs:
    flat = FlatLogprobs()
    flat.append(None)
    flat.append_fast([6, 9], [-1.5, -0.5], iter([2, 1]), [None, None])  # type: ignore[arg-type]
    return flat


class Engine:
    def __init__(self, failure: Exception | None = None, *, hangs: bool = False) -> None:
        self.failure, self.hangs = failure, hangs
        self.asked: list[Any] = []
        self.adapters: list[str | None] = []
        self.was_canceled = False

    async def generate(
        self, prompt: Any, params: Any, request_id: str, lora_request: str | None = None
    ) -> AsyncIterator[Any]:
        self.asked.append((prompt, params, request_id))
        self.adapters.append(lora_request)
        try:
            if self.hangs:
                await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.was_canceled = True
            raise
        if self.failure is not None:
            raise self.failure
        yield SimpleNamespace(outputs=[completion()], prompt_logprobs=scored())


async def passed_on(scope: Any, receive: Any, send: Any) -> None:
    await send("passed on")


async def answer(engine: Engine, body: bytes, *, method: str = "POST", path: str = ROUTE, leaves: bool = False) -> Any:
    """Return (status, JSON) of a request, or the messages of the rest of the server."""
    served = SimpleNamespace(lora_requests={"policy": "request of the policy"})
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine, openai_serving_models=served))
    half = len(body) // 2
    incoming = [{"type": "http.request", "body": body[:half], "more_body": True}]
    incoming += [{"type": "http.request", "body": body[half:]}]
    sent: list[Any] = []

    async def receive() -> Any:
        if incoming:
            return incoming.pop(0)
        await asyncio.sleep(0.02 if leaves else 30)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "app": app}
    await CompactGenerate(passed_on)(scope, receive, send)
    if not sent or sent == ["passed on"]:
        return sent
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_scores_of_the_prompt_replace_the_completion_if_they_are_asked_for():
    params = {**BODY["sampling_params"], "prompt_logprobs": 1}
    status, fields = await answer(Engine(), json.dumps({**BODY, "sampling_params": params}).encode())
    assert status == 200
    assert decode_scores(fields) == ([6, 9], [-1.5, -0.5], ["4"])


async def test_the_answer_equals_the_engines_record():
    engine = Engine()
    status, fields = await answer(engine, json.dumps(BODY).encode())
    assert status == 200
    read = decode_answer(fields)
    assert (read.sampled_ids, read.candidate_ids, read.starts) == ([7, 8], [7, 8], [0, 1])
    assert read.candidate_logprobs == [-1.5, float("-inf")]
    assert (read.finish_reason, read.versions) == ("length", [("4", 0, 2)])
    assert read.routes is not None
    assert read.routes.dtype == np.uint8
    assert read.routes.tolist() == np.arange(12).reshape(3, 2, 2).tolist()
    (prompt, params, _) = engine.asked[0]
    assert prompt == {"prompt_token_ids": [5, 6]}
    assert (params.seed, params.max_tokens, params.logprobs) == (3, 2, 0)


async def test_a_request_names_its_adapter_and_one_that_the_server_lacks_gets_400():
    engine = Engine()
    for changes, expected in (({}, None), ({"model": "policy"}, "request of the policy")):
        status, _ = await answer(engine, json.dumps(BODY | changes).encode())
        assert (status, engine.adapters[-1]) == (200, expected)
    status, said = await answer(engine, json.dumps(BODY | {"model": "last"}).encode())
    assert (status, len(engine.asked)) == (400, 2)
    assert "the server has no adapter last; it was started with policy" in said["error"]


async def test_other_routes_are_passed_on():
    assert await answer(Engine(), b"", path="/inference/v1/generate") == ["passed on"]
    assert await answer(Engine(), b"", method="GET") == (200, {})


@pytest.mark.parametrize(
    ("body", "failure", "status", "said"),
    [
        (b"{", None, 400, "JSONDecodeError"),
        (b"{}", None, 400, "token_ids"),
        (b'{"token_ids": [5]}', None, 400, "sampling_params"),
        (json.dumps({**BODY, "token_ids": [-1]}).encode(), None, 400, "non-negative integers"),
        (json.dumps({**BODY, "sampling_params": {"tempratur": 1}}).encode(), None, 400, "tempratur"),
        (json.dumps(BODY).encode(), VLLMValidationError("too long"), 400, "too long"),
        (json.dumps(BODY).encode(), RuntimeError("core died"), 500, "core died"),
    ],
)
async def test_an_invalid_request_gets_400_and_a_failed_engine_500(body: bytes, failure: Any, status: int, said: str):
    found, fields = await answer(Engine(failure), body)
    assert found == status
    assert said in fields["error"]


async def test_a_disconnected_client_cancels_its_request():
    engine = Engine(hangs=True)
    assert await answer(engine, json.dumps(BODY).encode(), leaves=True) == []
    await asyncio.sleep(0.05)
    assert engine.was_canceled
