"""Tests of clients that disconnect, give up or send a request again: every answer they see is recorded once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import openai

from lockstep.integrations.gateway.server import Gateway
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import ImageSpan
from tests.fixtures.gateway import Running, running
from tests.fixtures.tokenizers import chat_tokenizer

QWEN = chat_tokenizer("qwen3")
USER = {"role": "user", "content": "say it"}
BODY = json.dumps({"model": "policy", "messages": [USER]})


class Gate:
    """Engine calls that wait until they are let through, one by one."""

    def __init__(self, server: Running) -> None:
        self._generate = server.engine.generate
        self._open = asyncio.Event()
        self.num_waiting = self.num_canceled = 0
        self.seeds: list[int | None] = []
        server.engine.generate = self.generate  # type: ignore[method-assign]

    async def generate(self, prompt_ids: Any, sampling: Sampling, images: Sequence[ImageSpan] = ()) -> Any:
        self.num_waiting += 1
        self.seeds.append(sampling.seed)
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.num_canceled += 1
            raise
        finally:
            self.num_waiting -= 1
        return await self._generate(prompt_ids, sampling)

    def open(self) -> None:
        self._open.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def posted(server: Running, http: aiohttp.ClientSession, *, body: str = BODY, **headers: str) -> Any:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(
        f"{server.gateway.base_url.replace('/v1', '/s/x/v1')}/chat/completions",
        data=body,
        headers={"Authorization": f"Bearer {server.gateway.api_key}", **headers},
    )


async def send_without_reading(server: Running) -> asyncio.StreamWriter:
    port = int(server.gateway.base_url.rpartition(":")[2].split("/")[0])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /s/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.gateway.api_key}\r\n"
    writer.write(f"{head}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode())
    await writer.drain()
    return writer


async def test_a_client_that_times_out_and_retries_is_recorded_once_with_the_seed_of_its_first_attempt():
    async with running(QWEN, "hello<|im_end|>") as server:
        gate = Gate(server)
        session = server.gateway.open_session(sampling=Sampling(max_tokens=9), seed=3, max_requests=1)
        async with openai.AsyncOpenAI(base_url=server.gateway.base_url, api_key=session.key, max_retries=1) as client:
            slow = client.with_options(timeout=0.5).chat.completions.create(model="m", messages=[USER])
            asking = asyncio.create_task(slow)
            await until(lambda: gate.num_canceled == 1)
            gate.open()
            answer = await asking
        (call,) = session.calls
        assert answer.choices[0].message.model_extra["generation_token_ids"] == list(call.sampled_ids)
        assert len(gate.seeds) == 2
        assert gate.seeds[0] == gate.seeds[1]
        assert session.prompts == {"root": 1}


async def test_a_client_that_leaves_frees_the_engine_and_leaves_no_trace(caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        async with running(QWEN, "hello<|im_end|>") as server:
            gate = Gate(server)
            for _ in range(3):
                writer = await send_without_reading(server)
                await until(lambda: gate.num_waiting == 1)
                writer.close()
                await until(lambda: gate.num_waiting == 0)
            assert gate.num_canceled == 3
            assert server.gateway._named == {}, "a session is kept for its answers"
    assert [record for record in caplog.records if record.name != "asyncio"] == []
    assert "Traceback" not in capfd.readouterr().err


async def test_a_retry_of_an_answer_that_was_lost_gets_the_recorded_one():
    async with running(QWEN, "hello<|im_end|>", "other<|im_end|>") as server, aiohttp.ClientSession() as http:
        writer = await send_without_reading(server)
        await until(lambda: len(server.engine.prompts) == 1)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        async with posted(server, http, x_stainless_retry_count="1") as response:
            answer = await response.json()
        assert answer["choices"][0]["message"]["content"] == "hello"
        assert len(server.engine.prompts) == len(server.gateway._named["x"].calls) == 1


async def test_equal_requests_are_separate_samples_unless_they_say_that_they_are_retries():
    async with running(QWEN, *(f"turn {i}<|im_end|>" for i in range(4))) as server, aiohttp.ClientSession() as http:
        texts = []
        for headers in ({}, {}, {"x_stainless_retry_count": "0"}, {"x_stainless_retry_count": "1"}):
            async with posted(server, http, **headers) as response:
                texts.append((await response.json())["choices"][0]["message"]["content"])
        assert texts == [f"turn {i}" for i in range(4)], "the connection of the earlier ones is open: they arrived"


async def test_an_idempotency_key_gets_one_answer():
    async with running(QWEN, "one<|im_end|>", "two<|im_end|>") as server, aiohttp.ClientSession() as http:
        gate = Gate(server)
        first = asyncio.create_task(posted(server, http, Idempotency_Key="k")._coro)
        await until(lambda: gate.num_waiting == 1)
        async with posted(server, http, Idempotency_Key="k") as response:
            assert response.status == 409
        gate.open()
        contents = [(await (await first).json())["choices"][0]["message"]["content"]]
        for key in ("k", "k", "other"):
            async with posted(server, http, Idempotency_Key=key) as response:
                contents.append((await response.json())["choices"][0]["message"]["content"])
        assert contents == ["one", "one", "one", "two"]
        other = json.dumps({"model": "policy", "messages": [USER, USER]})
        async with posted(server, http, body=other, Idempotency_Key="k") as response:
            assert response.status == 422
            assert "Idempotency-Key" in (await response.json())["error"]["message"]
        assert len(server.gateway._named["x"].calls) == 2


async def test_an_answer_that_could_not_be_written_is_not_recorded(monkeypatch):
    async with running(QWEN, "one<|im_end|>", "two<|im_end|>") as server, aiohttp.ClientSession() as http:
        deliver = Gateway._deliver

        async def fails(*_: Any) -> Any:
            raise ConnectionResetError("Cannot write to closing transport")

        monkeypatch.setattr(Gateway, "_deliver", fails)
        async with posted(server, http, Idempotency_Key="k") as response:
            assert response.status == 500
        assert server.gateway._named == {}
        monkeypatch.setattr(Gateway, "_deliver", deliver)
        async with posted(server, http, Idempotency_Key="k") as response:
            message = (await response.json())["choices"][0]["message"]
        assert message["content"] == "two"
        session = server.gateway._named["x"]
        assert [(answer.order, answer.message["content"]) for answer in session._answers] == [((0, 0), "two")]
        assert session.prompts == {"root": 1}


async def test_a_client_that_does_not_read_its_answer_is_disconnected(monkeypatch):
    monkeypatch.setattr("lockstep.integrations.gateway.transfer.TRANSFER_S", 0.3)
    long = QWEN.encode("word " * 3000) + QWEN.encode("<|im_end|>")
    async with running(QWEN, long, max_model_len=100_000, sampling=Sampling(max_tokens=20_000)) as server:
        monkeypatch.setattr("tests.unit.integrations.gateway.test_retries.BODY", BODY.replace("}]", '}], "n": 128'))
        writer = await send_without_reading(server)
        await until(lambda: len(server.engine.prompts) == 128)
        await until(lambda: server.gateway._named == {})
        writer.close()
