"""Tools of real MCP servers over both transports: answers, faults of servers, and their processes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.integrations.environments.mcp import McpEnvironment
from lockstep.integrations.tool_servers.tool_server import close_servers
from lockstep.rollout.errors import ConfigError
from tests.fixtures.paths import ROOT
from tests.fixtures.policies import Policy, play, tool_call
from tests.fixtures.processes import listens
from tests.fixtures.turns import use

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
]  # a server imports the package in seconds, on a busy machine in a minute
SERVER = str(ROOT / "tests/fixtures/mcp_server.py")
STDIO = {"command": sys.executable, "args": [SERVER]}
NAMES = ["multiply", "count", "refuse", "wait", "die", "draw", "flood", "garbage"]


def environment(servers: dict[str, Any], **settings: Any) -> McpEnvironment:
    return McpEnvironment(servers=servers, **{"start_timeout_s": 300.0, "tool_timeout_s": 300.0, **settings})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A streamable HTTP server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(3000):
            if listens(port):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    close_servers()


@pytest.fixture(params=["stdio", "http"])
async def started(request: pytest.FixtureRequest) -> McpEnvironment:
    """An environment after its reset."""
    servers = {"one": STDIO} if request.param == "stdio" else {"one": {"url": request.getfixturevalue("address")}}
    made = environment(servers)
    await made.reset({"question": "go"})
    return made


async def result(made: McpEnvironment, name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """Return the text of a tool result, and the outcome."""
    step = await made.step(use(name, **arguments))
    (message,) = step.messages
    return str(message["content"]), dict(step.outcome)


async def test_tools_are_listed_with_their_schemas(started):
    assert [tool["function"]["name"] for tool in started.tools] == NAMES
    multiply = started.tools[0]["function"]
    assert multiply["description"] == "Multiply two integers."
    assert multiply["parameters"]["required"] == ["a", "b"]


async def test_results_are_texts(started):
    assert await result(started, "multiply", a=6, b=7) == ("42", {"tool_calls": 1, "tool_errors": 0})
    text, outcome = await result(started, "flood", mib=1)
    assert text.endswith("[cut: 1048576 characters, 8192 shown]")
    assert outcome["tool_errors"] == 0


@pytest.mark.parametrize(
    ("name", "arguments", "fault", "text"),
    [
        (
            "multiply",
            {"a": "six", "b": 7},
            "bad_arguments",
            "error: wrong arguments for multiply (a): 'six' is not of type",
        ),
        ("multiply", {"a": 1}, "bad_arguments", "error: wrong arguments for multiply: 'b' is a required property"),
        ("divide", {}, "unknown_tool", "error: there is no tool 'divide'; tools: multiply, count"),
        ("refuse", {"reason": "not today"}, "exception", "not today"),
        ("draw", {}, "server", "error: draw: the tool returned image, and only text can be read"),
    ],
)
async def test_calls_that_fail_are_answered(started, name, arguments, fault, text):
    found, outcome = await result(started, name, **arguments)
    assert text in found
    assert outcome == {"tool_calls": 1, "tool_errors": 1, f"tool_errors_{fault}": 1}


@pytest.mark.parametrize("kind", ["stdio", "http"])
async def test_a_call_that_is_never_answered_ends_at_its_limit_and_the_server_stays(kind, request):
    servers = {"one": STDIO} if kind == "stdio" else {"one": {"url": request.getfixturevalue("address")}}
    await environment(servers).reset({"question": "go"})  # starts the server
    quick = environment(servers, tool_timeout_s=2.0)
    await quick.reset({"question": "go"})
    started = time.monotonic()
    found, outcome = await result(quick, "wait")
    assert time.monotonic() - started < 20
    assert found == "error: wait timed out: no answer in 2 s"
    assert outcome["tool_errors_timeout"] == 1
    patient = environment(servers)
    await patient.reset({"question": "go"})
    assert (await result(patient, "multiply", a=2, b=2))[0] == "4"


async def test_calls_of_one_turn_run_at_the_same_time_and_all_episodes_share_a_server():
    first, second = environment({"one": STDIO}), environment({"one": STDIO})
    await asyncio.gather(first.reset({"question": "go"}), second.reset({"question": "go"}))
    pids = await asyncio.gather(result(first, "count"), result(second, "count"))
    assert pids[0] == pids[1]


async def test_a_server_that_dies_is_an_error_that_quotes_it_and_the_next_call_starts_it_again():
    made = environment({"mortal": STDIO})
    await made.reset({"question": "go"})
    (before, _), (found, outcome), (after, _) = [await result(made, name) for name in ("count", "die", "count")]
    assert outcome["tool_errors_server"] == 1
    assert found.startswith("error: die: server mortal: ")
    assert "dying words" in found
    assert before != after
    assert "pid" in after


async def test_a_message_beyond_the_limit_ends_the_connection():
    made = environment({"loud": STDIO}, max_message_mib=0.5)
    await made.reset({"question": "go"})
    found, outcome = await result(made, "flood", mib=1)
    assert outcome["tool_errors_server"] == 1
    assert "longer than the limit" in found
    assert (await result(made, "multiply", a=3, b=3))[0] == "9"


async def test_an_http_answer_beyond_the_limit_is_an_error(address):
    made = environment({"loud": {"url": address}}, max_message_mib=0.5, tool_timeout_s=60.0)
    await made.reset({"question": "go"})
    found, outcome = await result(made, "flood", mib=1)
    assert outcome["tool_errors"] == 1, found
    assert (await result(made, "multiply", a=3, b=3))[0] == "9"


async def test_lines_that_are_no_messages_are_passed_over():
    made = environment({"one": STDIO})
    await made.reset({"question": "go"})
    assert (await result(made, "garbage"))[0] == "after garbage"


async def test_whole_episodes_are_played(started):
    def answer(prompt: str) -> str:
        return "It is 42." if "<tool_response>" in prompt else tool_call("multiply", a=6, b=7)

    rollout = await play(started, Policy(answer))
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "42"
    assert rollout.outcome["tool_calls"] == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("servers", "sentence"),
        [
            ({}, "environment=mcp has no servers"),
            ({"a": {}}, "servers.a needs either a command or a url"),
            ({"a": {"command": "x", "url": "http://x"}}, "needs either a command or a url"),
            ({"a": {"command": "no-such-program"}}, "no-such-program is not a program"),
            ({"a": {"url": "x:1"}}, "servers.a.url=x:1 is not an address"),
            ({"a": {"command": "sh", "args": [1]}}, r"servers.a.args=\[1\] is not a list of texts"),
            ({"a": {"command": "sh", "arg": ["x"]}}, "servers.a.arg is not a setting; set one of command, args"),
            ({"a b": {"command": "sh"}}, "the name 'a b' must consist of"),
            ({"a": "sh"}, "servers.a='sh' is not a server"),
        ],
    )
    def test_wrong_settings(self, servers, sentence):
        with pytest.raises(ConfigError, match=sentence):
            environment(servers)

    def test_limits_out_of_range(self):
        with pytest.raises(ConfigError, match="tool_timeout_s=0"):
            environment({"a": STDIO}, tool_timeout_s=0)

    @pytest.mark.parametrize(
        ("server", "sentence"),
        [
            ({"command": "sh", "args": ["-c", "echo broken config >&2; exit 1"]}, "cannot be used: .*broken config"),
            ({"command": "sh", "args": ["-c", "sleep 1000"]}, "did not list its tools in 1 s"),
            ({"command": "sh", "args": ["-c", "yes"]}, "did not list its tools in 1 s|cannot be used"),
            ({"url": "http://127.0.0.1:9/mcp"}, "cannot be used: "),
            ({"command": "sh", "env": {"KEY": "$NO_SUCH_VARIABLE"}}, "variable NO_SUCH_VARIABLE, which is not set"),
        ],
    )
    async def test_servers_that_cannot_be_used(self, server, sentence):
        import mcp  # noqa: F401  # its import is not part of the limit

        seconds = 1.0 if "1 s" in sentence else 60.0
        with pytest.raises(ConfigError, match=sentence):
            await environment({"a": server}, start_timeout_s=seconds).reset({"question": "go"})

    async def test_a_tool_that_is_not_listed_and_two_of_one_name(self):
        with pytest.raises(ConfigError, match=r"servers.a.tools names 'nothing'; server a lists multiply, count"):
            await environment({"a": {**STDIO, "tools": ["nothing"]}}).reset({"question": "go"})
        two = {"a": {**STDIO, "tools": ["count"]}, "b": {**STDIO, "tools": ["count"]}}
        with pytest.raises(ConfigError, match="2 MCP tools are named 'count'"):
            await environment(two).reset({"question": "go"})


USES = f"""
import asyncio, os, sys, time
from lockstep.integrations.environments.mcp import McpEnvironment
from tests.fixtures.turns import use

async def main():
    made = McpEnvironment(
        servers={{"one": {{"command": sys.executable, "args": [{SERVER!r}]}}}}, start_timeout_s=300, tool_timeout_s=300
    )
    await made.reset({{"question": "go"}})
    step = await made.step(use("count"))
    print(step.messages[0]["content"], flush=True)

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise KeyError(1)", "os._exit(4)", "os.kill(os.getpid(), 9)"])
def test_the_server_ends_with_the_process_on_every_path(ending: str):
    done = subprocess.run(
        [sys.executable, "-c", USES + ending],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    pid = int("".join(filter(str.isdigit, done.stdout)))
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid), done.stderr
