"""Tests of hostile clients: malformed HTTP, slow and compressed requests, and requests that open sessions."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import socket
import time
from collections.abc import Awaitable, Iterator

import aiohttp
import openai
import pytest

from lockstep.integrations.gateway.dialects import DIALECTS
from lockstep.integrations.gateway.errors import ApiError
from lockstep.rollout.errors import EngineError
from tests.fixtures.gateway import Running, running
from tests.fixtures.tokenizers import chat_tokenizer

QWEN = chat_tokenizer("qwen3")
USER = {"role": "user", "content": "say it"}
BODY = json.dumps({"model": "policy", "messages": [USER]})


async def raw_answer(server: Running, request: bytes, *, timeout_s: float = 20) -> bytes:
    """Send bytes and return everything that comes back until the gateway closes the connection."""
    port = int(server.gateway.base_url.rpartition(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), timeout_s)
    writer.close()
    return answer


async def in_turn(sends: Iterator[Awaitable[None]]) -> None:
    for send in sends:
        await send


def headers_of(server: Running) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.gateway.api_key}"}


async def test_malformed_requests_leave_neither_a_key_nor_a_traceback_in_the_log(caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        async with running(QWEN, "hello<|im_end|>") as server:
            key = server.gateway.api_key
            for request in (
                f"GET /v1/models HTTP/1.1\n\nAuthorization: Bearer {key}\r\n\r\n",
                f"GET /v1/models HTTP/1.1\r\nAuthorization : Bearer {key}\r\n\r\n",
                f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
                "Transfer-Encoding: chunked\r\n\r\nnot a chunk\r\n\r\n",
                f"GET / HTTP/9.9 {key}\r\n\r\n",
                f"\x16\x03\x01{key}",
            ):
                answer = await raw_answer(server, request.encode())
                assert not answer.startswith(b"HTTP/1.1 2"), request
        assert key not in caplog.text
        assert "Traceback" not in caplog.text
        shown = capfd.readouterr()
        assert key not in shown.out + shown.err
        assert "Traceback" not in shown.err


async def test_a_request_that_is_half_sent_times_out_and_others_are_served_meanwhile(monkeypatch):
    monkeypatch.setattr("lockstep.integrations.gateway.server.IDLE_S", 0.5)
    monkeypatch.setattr("lockstep.integrations.gateway.transfer.TRANSFER_S", 0.5)
    async with running(QWEN, "hello<|im_end|>") as server:
        start = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.gateway.api_key}\r\n"
        half = [b"", b"GET /v1/models HT", start.encode(), f"{start}Content-Length: 99\r\n\r\n{{".encode()]
        answers = [asyncio.create_task(raw_answer(server, request)) for request in half * 5]
        await asyncio.sleep(0.1)
        await server.ask([USER])
        assert not any(answer.done() for answer in answers)
        received = await asyncio.gather(*answers)
        assert received[:3] == [b"", b"", b""]
        assert received[3].startswith(b"HTTP/1.1 408")
        assert b"did not arrive in 0.5 s" in received[3]


@pytest.mark.parametrize(("route", "has_key"), [("/v1/models", True), ("/v1/models", False), ("/nothing", False)])
async def test_a_client_that_does_not_read_its_answers_is_disconnected(monkeypatch, route, has_key):
    monkeypatch.setattr("lockstep.integrations.gateway.transfer.TRANSFER_S", 0.5)
    async with running(QWEN, "hello<|im_end|>") as server:
        key = f"Authorization: Bearer {server.gateway.api_key}\r\n" if has_key else ""
        requests = f"GET {route} HTTP/1.1\r\nHost: x\r\n{key}\r\n".encode() * 1000
        port = int(server.gateway.base_url.rpartition(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            endless = (loop.sock_sendall(client, requests) for _ in itertools.count())
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(in_turn(endless), 20)
        await server.ask([USER])


async def test_a_compressed_request_is_refused_before_it_is_unpacked():
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        url = f"{server.gateway.base_url}/chat/completions"
        for headers in ({}, headers_of(server)):
            for encoding in ("gzip", "deflate", "identity, gzip"):
                headers["Content-Encoding"] = encoding
                async with http.post(url, data=gzip.compress(BODY.encode()), headers=headers) as response:
                    assert response.status == 415
                    assert "Content-Encoding" in (await response.json())["error"]["message"]
        headers = {**headers_of(server), "Content-Encoding": "identity"}
        async with http.post(url, data=BODY, headers=headers) as response:
            assert response.status == 200


async def test_only_an_answer_opens_a_session(monkeypatch):
    monkeypatch.setattr("lockstep.integrations.gateway.server.MAX_NAMED_SESSIONS", 2)
    async with running(QWEN, "hello<|im_end|>", max_model_len=64) as server, aiohttp.ClientSession() as http:
        root, headers = server.gateway.base_url.removesuffix("/v1"), headers_of(server)
        for number in range(8):
            for method, path, body in (
                ("GET", "v1/models", None),
                ("GET", "v1/models/policy", None),
                ("POST", "tokenize", json.dumps({"messages": [USER]})),
                ("POST", "v1/chat/completions", "{}"),
                ("POST", "v1/chat/completions", json.dumps({"model": "policy", "messages": []})),
                ("POST", "v1/chat/completions", json.dumps({"model": "policy", "messages": [USER], "n": 0})),
                ("POST", "v1/chat/completions", BODY.replace("say it", "word " * 100)),
                ("POST", "v1/chat/completions", BODY.replace("say it", "x" * 10**5)),
            ):
                url = f"{root}/s/{number}/{path}"
                async with http.request(method, url, data=body, headers=headers) as response:
                    assert response.status in (200, 400)
        server.engine.error = EngineError("dead")
        with pytest.raises(openai.InternalServerError):
            await server.client_of("failed").chat.completions.create(model="policy", messages=[USER])
        server.engine.error = None
        assert server.gateway._named == {}
        for name in ("a", "b", "a"):
            await server.client_of(name).chat.completions.create(model="policy", messages=[USER])
        with pytest.raises(openai.RateLimitError, match="2 sessions are open"):
            await server.client_of("c").chat.completions.create(model="policy", messages=[USER])


async def test_the_error_of_an_engine_is_in_the_log_and_not_in_the_answer(caplog):
    async with running(QWEN, "hello<|im_end|>") as server:
        server.engine.error = EngineError("cannot sample: /home/me/models/secret has died\nlog")
        with pytest.raises(openai.InternalServerError) as caught:
            await server.ask([USER])
        assert "/home/me" not in caught.value.response.text
        assert "log has the details" in caught.value.message
        assert "/home/me/models/secret" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": "x" * 10**6},
        {"n": 10**4000},
        {"x" * 10**6: 1},
        {"messages": [{"role": "x" * 10**6, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 10**6}]}]},
        {"stop_token_ids": list(range(10**5))},
        {"stop": [["x" * 10**6]]},
        {"tools": [{"type": "function", "function": {"name": ["y" * 10**6] * 3}}]},
    ],
    ids=lambda change: next(iter(change))[:20],
)
async def test_errors_do_not_return_a_large_value_to_its_sender(change):
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        body = json.dumps({"model": "policy", "messages": [USER], **change})
        url = f"{server.gateway.base_url}/chat/completions"
        async with http.post(url, data=body, headers=headers_of(server)) as response:
            text = await response.text()
        assert response.status == 400
        assert len(text) < 1000
        assert server.engine.prompts == []


HOSTILE = {
    "malformed": b"{",
    "deep": b'{"model": "policy", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "brackets": b"[" + b"[]," * 200_000 + b"[]]",
    "surrogate keys": rb'{"model": "policy", "\ud800": 1, "messages": [{"role": "user", "content": "\udc00"}]}',
    "another type": b'{"model": "policy", "messages": {"a": 1}, "input": 1.5, "prompt": {"b": []}, "max_tokens": []}',
    "no model": b"{}",
    "a long name": b'{"model": "' + b"x" * 10**6 + b'"}',
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
async def test_every_dialect_answers_hostile_bodies_in_its_own_form(dialect):
    form = set(dialect.error(ApiError("x")))
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        url = f"{server.gateway.base_url}{dialect.path}"
        for name, body in HOSTILE.items():
            async with http.post(url, data=body, headers=headers_of(server)) as response:
                assert response.status in (400, 404), name
                text = await response.text()
                assert set(json.loads(text)) == form, name
                assert len(text) < 1000, name
        async with http.post(url, data=b"{}") as response:
            assert response.status == 401
            assert set(await response.json()) == form
        async with http.get(url, headers=headers_of(server)) as response:
            assert response.status == 405
            assert set(await response.json()) == form
        assert server.engine.prompts == []
        assert server.gateway._anonymous.is_unused


@pytest.mark.parametrize("path", ["/responses", "/messages"])
async def test_many_small_parts_take_time_in_proportion_to_their_size(path):
    """Parts of one turn are joined at the end: one by one, 64 MiB of them would take minutes."""
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        text = "x" * 500
        blocks = [{"type": "text", "text": text}] * 30_000
        item = {"type": "message", "role": "assistant", "id": "msg_" + "a" * 24}
        items = [{**item, "content": [{"type": "output_text", "text": text}]}] * 30_000
        messages = [USER, {"role": "assistant", "content": blocks}, USER]
        body = {"model": "policy", **({"input": items} if path == "/responses" else {"messages": messages})}
        body |= {} if path == "/responses" else {"max_tokens": 5}
        started = time.process_time()
        async with http.post(f"{server.gateway.base_url}{path}", json=body, headers=headers_of(server)) as response:
            assert response.status == 400
            assert "maximum context length" in await response.text()
        assert time.process_time() - started < 10


async def test_connections_beyond_half_of_the_open_files_are_closed_and_the_others_served(caplog):
    async with running(QWEN, "hello<|im_end|>") as server:
        server.gateway._max_connections = 8
        port = int(server.gateway.base_url.rpartition(":")[2].split("/")[0])
        await server.ask([USER])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(7)]
        for _ in range(20):
            assert await raw_answer(server, b"") == b""
        await server.ask([USER])
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.1)
        answer = await raw_answer(server, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert caplog.text.count("8 connections are open") == 1


async def test_a_request_of_many_small_parts_is_refused_before_it_is_parsed(monkeypatch):
    async with running(QWEN, "hello<|im_end|>") as server, aiohttp.ClientSession() as http:
        monkeypatch.setattr("lockstep.integrations.gateway.server.read_json", lambda raw: pytest.fail("it was parsed"))
        url, body = f"{server.gateway.base_url}/chat/completions", "[" + "[]," * 200_000 + "[]]"
        async with http.post(url, data=body, headers=headers_of(server)) as response:
            assert response.status == 400
            assert "200002 opening brackets" in (await response.json())["error"]["message"]
