"""Tool servers that lie: schemas that fetch, hang or end the run, and answers that fill memory or never come."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from lockstep.integrations.environments.mcp import McpEnvironment
from lockstep.integrations.tool_servers.tool_server import close_servers
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.hosts import foreign_schemas
from tests.fixtures.hostile_mcp_server import reply_to
from tests.fixtures.paths import ROOT
from tests.fixtures.turns import use

pytestmark = pytest.mark.timeout(600)
SERVER = str(ROOT / "tests/fixtures/hostile_mcp_server.py")


@pytest.fixture(autouse=True)
def no_server_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    close_servers()


def tool(properties: dict[str, Any] | None = None, *, name: str = "act", **schema: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object", "properties": properties or {}, **schema}}


async def environment(*tools: dict[str, Any], timeout_s: float = 60.0, **orders: Any) -> McpEnvironment:
    """An environment after its reset."""
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        json.dump({"tools": tools, **orders}, file)
    words = [SERVER, file.name]
    made = McpEnvironment(
        servers={"one": {"command": sys.executable, "args": words}}, start_timeout_s=300.0, tool_timeout_s=timeout_s
    )
    await made.reset({"question": "go"})
    return made


async def result(made: McpEnvironment, **arguments: Any) -> tuple[str, str]:
    """Return the text of a tool result, and its fault."""
    step = await made.step(use("act", **arguments))
    (message,) = step.messages
    faults = [name.removeprefix("tool_errors_") for name in step.outcome if name.startswith("tool_errors_")]
    return str(message["content"]), "".join(faults)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


DOUBLING = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {"type": "integer"}}


class TestListed:
    @pytest.mark.parametrize(
        ("tools", "says"),
        [
            ([tool({"a": {"$ref": "#/nope"}})], "refers to '/nope', which is not part of it; nothing is fetched"),
            ([tool({"a": {"$ref": "file:///etc/hostname"}})], "refers to 'file:///etc/hostname'"),
            ([tool({"a": {"$dynamicRef": "http://127.0.0.1:9/s"}})], "refers to 'http://127.0.0.1:9/s'"),
            ([tool(allOf=[{"$ref": "#"}])], "refers to itself for the same value"),
            ([tool({"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}})], "refers to itself"),
            ([tool({"a": {"anyOf": [{"not": {"$ref": "#/properties/a"}}]}})], "refers to itself"),
            ([tool({"a": {"$ref": "#/x"}}, x={"type": 5})], "not a JSON schema: 5 is not valid"),
            ([tool({"a": {"$ref": "#/title"}}, title="t")], "not a JSON schema: 't' is not of type"),
            ([tool({"a": {"pattern": "((("}})], "is not a 'regex'"),
            ([tool(required="a")], "cannot be used"),
            ([tool(**{"$id": "http://[x"})], "its schema cannot be read"),
            ([tool({"a": nested(60)})], "nested more than 100 levels deep"),
            ([tool({"a": {"maximum": 1e308 * 10}})], "cannot be written as JSON"),
            ([tool({"a": {"description": "x" * 2**18}})], "at most 262144 fit"),
            ([tool(name=f"t{n}") for n in range(300)], "lists 300 tools, at most 256 fit"),
            ([tool(name="a b")], "has a name that models cannot write"),
            ([{"name": "act", "inputSchema": {"type": "array"}}], "cannot be used"),
            ([], "lists no tools"),
        ],
    )
    async def test_a_schema_that_cannot_be_checked_refuses_the_server_with_a_sentence(self, tools: Any, says: str):
        with pytest.raises(ConfigError, match="MCP server one") as refused:
            await environment(*tools)
        assert says in str(refused.value)

    async def test_nothing_is_fetched(self):
        fetched = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            fetched.append(await reader.readline())
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match="nothing is fetched"):
            await environment(tool({"a": {"$ref": f"http://127.0.0.1:{port}/schema.json"}}))
        server.close()
        assert fetched == []

    async def test_usual_schemas_are_taken(self):
        tree = {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
        made = await environment(
            tool({"a": {"$ref": "#/$defs/tree"}, "b": {"pattern": "^[a-z]+$"}}, **{"$defs": {"tree": tree}})
        )
        assert await result(made, a={"below": [{"below": []}]}, b="abc") == ("called", "")
        text, fault = await result(made, a={"below": [{"below": 3}]})
        assert fault == "bad_arguments"
        assert text == "error: wrong arguments for act (a.below[0].below): 3 is not of type 'array'"

    async def test_surrogates_in_a_description_are_replaced(self):
        (read,) = await foreign_schemas.read_tools([("act", "a\ud800b", {"type": "object"})])
        assert read["function"]["description"] == "a\ufffdb"


class TestArguments:
    @pytest.mark.parametrize(
        ("schema", "value"),
        [
            ({"pattern": "^(a+)+$"}, "a" * 40 + "!"),
            ({"patternProperties": {"^(a+)+$": {}}}, {"a" * 40 + "!": 1}),
            ({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}, {"a" * 40 + "!": 1}),
            ({"$ref": "#/$defs/d0"}, "x"),
        ],
    )
    async def test_a_check_that_does_not_end_is_ended_and_the_loop_goes_on(
        self, schema: dict[str, Any], value: Any, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(foreign_schemas, "CHECK_S", 1.0)
        made = await environment(tool({"a": schema}, **{"$defs": DOUBLING}))
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        text, fault = await result(made, a=value)
        ticking.cancel()
        assert fault == "server"
        assert text == "error: act: a check by its schema took more than 1 s"
        assert ticks > 10
        assert (await result(made)) == ("called", "")

    async def test_a_check_that_does_not_end_costs_other_calls_nothing(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(foreign_schemas, "CHECK_S", 1.0)
        made = await environment(tool({"a": {"pattern": "^(a+)+$"}}))
        hanging = asyncio.create_task(result(made, a="a" * 40 + "!"))
        await asyncio.sleep(0.5)
        assert await result(made, a="aaa") == ("called", "")
        assert (await hanging)[1] == "server"

    @pytest.mark.parametrize(
        ("schema", "value"),
        [
            ({"multipleOf": 0.01}, 10**350),
            ({"multipleOf": 1e-320}, 1e300),
            ({"multipleOf": 0.01}, 10**4000),
            ({"type": "string"}, {"a" * 2000: ["b" * 2000] * 500}),
        ],
    )
    async def test_what_the_model_writes_is_a_wrong_argument_and_no_more(self, schema: dict[str, Any], value: Any):
        text, fault = await result(await environment(tool({"a": schema})), a=value)
        assert fault in ("bad_arguments", "")
        assert text == "called" or text.startswith("error: wrong arguments for act")

    async def test_the_time_limit_of_a_call_holds_for_its_check_too(self):
        made = await environment(tool({"a": {"pattern": "^(a+)+$"}}), timeout_s=1.0)
        text, fault = await result(made, a="a" * 40 + "!")
        assert (text, fault) == ("error: act timed out: no answer in 1 s", "timeout")


class TestProcesses:
    async def test_what_a_server_prints_fills_no_disk_and_its_end_is_quoted(self):
        with pytest.raises(ConfigError, match=r"its last output: x+\ndying words"):
            await environment(tool(), prints=2**27, dies="\ndying words")
        assert [one.path for one in psutil.Process().open_files() if Path(one.path).stat().st_size > 2**20] == []


class Liar:
    """A streamable HTTP server in a thread, which answers as it is told."""

    def __init__(self, **orders: Any) -> None:
        """orders: those of the fixture, `raw` (bytes of the answer to a call, with `headers`), `hangs` (methods)."""
        self.orders = {"tools": [tool()], "hangs": (), **orders}
        self.deleted = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/mcp", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            self.deleted.set()
        if request.method in self.orders["hangs"]:
            await asyncio.Event().wait()
        if request.method != "POST":
            return web.Response(status=405)
        asked = await request.json()
        if "id" not in asked:
            return web.Response(status=202)
        if asked["method"] == "tools/call" and "raw" in self.orders:
            return web.Response(body=self.orders["raw"], headers=self.orders.get("headers", {}))
        headers = {"mcp-session-id": "s1"} if asked["method"] == "initialize" else {}
        return web.json_response(reply_to(asked, self.orders), headers=headers)

    async def environment(self, **settings: Any) -> McpEnvironment:
        made = McpEnvironment(
            servers={"one": {"url": self.url}}, **{"start_timeout_s": 120.0, "tool_timeout_s": 30.0, **settings}
        )
        await made.reset({"question": "go"})
        return made

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture
def lie(request: pytest.FixtureRequest) -> Iterator[Any]:
    liars: list[Liar] = []

    def make(**orders: Any) -> Liar:
        liars.append(Liar(**orders))
        return liars[-1]

    yield make
    close_servers()
    for liar in liars:
        liar.close()


class TestAddresses:
    async def test_a_server_that_hangs_in_the_end_of_its_session_does_not_hang_the_start(self, lie: Any):
        liar = lie(hangs=("DELETE",), tools=[tool(name="a b")])
        started = time.monotonic()
        with pytest.raises(ConfigError, match="has a name that models cannot write"):
            await liar.environment()
        assert liar.deleted.wait(10)
        assert time.monotonic() - started < 60

    async def test_a_compressed_answer_is_refused_before_it_is_unpacked(self, lie: Any):
        bomb = gzip.compress(b'{"jsonrpc": "2.0", "id": 1, "result": "' + b"x" * 2**28)
        before = psutil.Process().memory_info().rss
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        made = await lie(raw=bomb, headers=headers).environment(tool_timeout_s=20.0)
        text, fault = await result(made)
        assert fault in ("server", "timeout"), text
        assert psutil.Process().memory_info().rss - before < 2**27

    @pytest.mark.parametrize(
        "raw",
        [b"[" * 100_000, b"\xff\xfe", b"null", b"{}", b'{"jsonrpc": "2.0", "id": 1, "result": 5}', b"x" * 2**23],
        ids=["deep", "bytes", "null", "empty", "type", "long"],
    )
    async def test_an_answer_of_another_form_is_an_error_of_its_call(self, raw: bytes, lie: Any):
        made = await lie(raw=raw, headers={"Content-Type": "application/json"}).environment(tool_timeout_s=5.0)
        text, fault = await result(made)
        assert fault in ("server", "timeout"), text
