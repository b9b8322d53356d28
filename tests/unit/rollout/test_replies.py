"""Replies of other programs: bodies, JSON and numbers within limits."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web

from lockstep.rewards.functions.judges.answer_cache import MAX_CHARS, AnswerCache
from lockstep.rewards.functions.judges.scored import LlmJudge
from lockstep.rollout.environments.search import SearchEnvironment
from lockstep.rollout.errors import RewardError, SearchError
from lockstep.rollout.replies import limited_session, read_body, read_json, read_number


@asynccontextmanager
async def serving(body: bytes | None, **headers: str) -> AsyncIterator[str]:
    """Answer every request with the body; None: with bytes without end."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if body is not None:
            return web.Response(body=body, headers={"Content-Type": "application/json", **headers})
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 2**16)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("body", [b"x" * 101, None])
async def test_a_body_beyond_the_limit_is_refused(body: bytes | None):
    async with serving(body) as url, limited_session() as session, session.get(url) as response:
        with pytest.raises(ValueError, match="an answer of more than 100 bytes"):
            await read_body(response, 100)


async def test_a_body_within_the_limit_is_returned():
    async with serving(b"x" * 100) as url, limited_session() as session, session.get(url) as response:
        assert await read_body(response, 100) == b"x" * 100


BOMB = gzip.compress(b" " * 2**29)


async def ask_judge(url: str) -> None:
    await LlmJudge(url=url, model="m", attempts=1).ask("task", "reply", {"Answer": "x"}, str)


async def ask_search(url: str) -> None:
    await SearchEnvironment(url=url, attempts=1).step({"role": "assistant", "content": "<search>x</search>"})


@pytest.mark.parametrize("ask", [ask_judge, ask_search])
@pytest.mark.parametrize(
    "body", [b"[" * 10**5, b'{"a":' * 300 + b"1" + b"}" * 300, b"NaN", b'{"a": 1e400}', b"\xff\xfe", b"", b"[]",
             b'{"choices": []}', b'{"choices": [5]}', b'{"result": 5}', b" " * 2**23, None],
    ids=["open", "deep", "nan", "infinite", "bytes", "empty", "list", "none", "five", "result", "long", "endless"],
)  # fmt: skip
async def test_an_answer_of_another_form_is_an_error_of_its_call(ask: Any, body: bytes | None):
    async with serving(body) as url:
        with pytest.raises((RewardError, SearchError)):
            await ask(url)


@pytest.mark.parametrize("ask", [ask_judge, ask_search])
async def test_a_compressed_answer_is_not_unpacked(ask: Any):
    before = psutil.Process().memory_info().rss
    async with serving(BOMB, **{"Content-Encoding": "gzip"}) as url:
        with pytest.raises((RewardError, SearchError)):
            await ask(url)
    assert psutil.Process().memory_info().rss - before < 2**26


async def test_an_answer_that_is_long_is_not_kept():
    cache = AnswerCache(8)
    calls = 0

    async def call() -> str:
        nonlocal calls
        calls += 1
        return "x" * (MAX_CHARS + calls - 1)

    assert [(await cache.get(b"key", call))[1] for _ in range(2)] == [False, True]
    assert [(await cache.get(b"other", call))[1] for _ in range(2)] == [False, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 101 + "]" * 101, "more than 100 levels"),
        ("[" * 10**6, "nested too deeply"),
        ("NaN", "NaN is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("[1e400]", "the number 1e400 is too large"),
        ("1" * 5000, "4300 digits"),
        ("{", "Expecting property name"),
        (b"\xff", "can't decode"),
    ],
)
def test_json_beyond_the_limits_is_refused(text: str | bytes, says: str):
    with pytest.raises(ValueError, match=says):
        read_json(text)


def test_json_within_the_limits_is_read_and_infinities_where_they_are_allowed():
    assert read_json("[" * 100 + "]" * 100)
    assert read_json('{"a": [1, 2.5, null, true, "\\ud800"]}') == {"a": [1, 2.5, None, True, "\ud800"]}
    assert read_json("[NaN, 1e400]", is_finite=False)[1] == math.inf
    assert read_json(json.dumps(10**400)) == 10**400


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), np.int64(3), Decimal("0.5"), 10**100, -1e100])
def test_finite_numbers_are_floats(value: Any):
    assert read_number(value) == float(value)
    assert type(read_number(value)) is float


class Rude:
    def __float__(self) -> float:
        raise KeyError("no number")


@pytest.mark.parametrize(
    "value", ["1", b"1", None, [1], {}, 10**400, 10**101, math.inf, math.nan, np.ones(2), 2j, Rude(), Decimal("1e400")]
)
def test_anything_else_is_not_a_number(value: Any):
    with pytest.raises(ValueError, match="found "):
        read_number(value)
