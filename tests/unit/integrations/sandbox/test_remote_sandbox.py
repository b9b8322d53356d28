"""Sandboxes of a service over real HTTP: the reference server, and servers that are gone or lie."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lockstep.integrations.sandbox.remote_sandbox import RemoteSandbox
from lockstep.integrations.sandbox.sandbox_service import SandboxService
from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import ConfigError, SandboxError
from lockstep.rollout.records import RolloutStatus
from lockstep.rollout.sandbox.execution import Ended, Language, Limits
from lockstep.rollout.sandbox.program_session import SessionSandbox
from lockstep.rollout.sandbox.sandbox import local_enclosure
from tests.fixtures.paths import ROOT
from tests.fixtures.policies import play, tool_call
from tests.unit.integrations.environments.test_sandbox import results, script
from tests.unit.rollout.sandbox.test_program_session import children, launchers, mark
from tests.unit.rollout.sandbox.test_sandbox import contained, named, processes, wait_until

LIMITS = Limits(timeout_s=10.0, output_bytes=1000)
TOKEN = "secret-of-the-test"


async def make(limits: Limits) -> SessionSandbox:
    return await SessionSandbox.open(lambda: local_enclosure(limits, unsafe=False, setting=None))


class Served:
    """A service in this process."""

    def __init__(self, **settings: Any) -> None:
        self.service = SandboxService(
            make, **{"token": TOKEN, "limits": LIMITS, "max_sessions": 4, "idle_s": 600.0, **settings}
        )

    async def __aenter__(self) -> str:
        self.url = await self.service.start("127.0.0.1", 0)
        return self.url

    async def __aexit__(self, *_: object) -> None:
        await self.service.close()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with Served() as url:
        yield url


async def post(url: str, body: Any, token: str | None = TOKEN, method: str = "POST") -> tuple[int, Any]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with aiohttp.ClientSession(headers=headers) as client, client.request(method, url, data=data) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


@contained
class TestService:
    async def test_programs_run_and_files_stay(self, url):
        before = launchers()
        first, second = [await RemoteSandbox.open(url, TOKEN, LIMITS) for _ in range(2)]
        assert launchers() == before + 2
        written = await first.run(Language.PYTHON, "open('f', 'w').write('7')\nprint('ü')", timeout_s=5)
        assert (written.ended, written.status, written.stdout) == (Ended.EXITED, 0, "ü\n")
        assert (await first.run(Language.SHELL, "cat f", timeout_s=5)).stdout == "7"
        assert (await second.run(Language.SHELL, "cat f", timeout_s=5)).status == 1
        assert (await first.run(Language.SHELL, "sleep 9", timeout_s=0.5)).ended is Ended.TIMEOUT
        flood = await first.run(Language.PYTHON, "import os\nos.write(1, b'\\xff' * 4000)", timeout_s=5)
        assert (len(flood.stdout), flood.is_cut) == (1000, True)
        for sandbox in (first, second):
            await sandbox.close()
            await sandbox.close()
        assert launchers() == before

    async def test_whole_episodes_are_played(self, url, monkeypatch):
        monkeypatch.setenv("SANDBOX_TOKEN", TOKEN)
        before = launchers()
        environment = make_environment(
            "sandbox", sandbox="remote", url=url, token_env="SANDBOX_TOKEN", output_bytes=1000
        )
        assert await environment.problem() is None  # type: ignore[union-attr]
        turns = (tool_call("python", code="open('f', 'w').write('7')"), tool_call("shell", command="cat f"), "Done.")
        rollout = await play(environment, script(*turns))
        assert (rollout.status, results(rollout)) == (RolloutStatus.COMPLETED, ["exit status 0", "exit status 0\n7"])
        assert launchers() == before

    @pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x", ""])
    async def test_without_the_token_nothing_is_done(self, url, token):
        before = launchers()
        for method, path in (("POST", "/sessions"), ("POST", "/sessions/1/calls"), ("DELETE", "/sessions/1")):
            status, _ = await post(url + path, {"limits": {}}, token, method)
            assert status == 401
        with pytest.raises(SandboxError, match="status 401: expected Authorization"):
            await RemoteSandbox.open(url, token, LIMITS)
        assert launchers() == before

    @pytest.mark.parametrize(
        ("path", "body", "status", "says"),
        [
            ("/sessions", b"{", 400, "not JSON"),
            ("/sessions", b"[" * 100_000, 400, "not JSON"),
            ("/sessions", [], 400, "not an object"),
            ("/sessions", {}, 400, "limits"),
            ("/sessions", {"limits": 7}, 400, "TypeError"),
            ("/sessions", {"limits": {"memory": 7}}, 400, "unexpected keyword"),
            ("/sessions", {"limits": {"memory_mib": "7"}}, 400, "memory_mib='7' must be an integer"),
            (
                "/sessions",
                {"limits": {"memory_mib": 513}},
                400,
                "memory_mib=513 is above 512, the limit of this service",
            ),
            ("/sessions/1/calls", {"language": "python", "text": "", "timeout_s": 1}, 404, "may have expired"),
            ("/sessions/ID/calls", {"language": "ruby", "text": "", "timeout_s": 1}, 400, "'ruby' is not a valid"),
            ("/sessions/ID/calls", {"language": "python", "text": 7, "timeout_s": 1}, 400, "expected a text"),
            ("/sessions/ID/calls", {"language": "python", "text": "", "timeout_s": 1e9}, 400, "timeout_s up to 5.0"),
            ("/sessions/ID/calls", {"language": "python", "text": "", "timeout_s": "1"}, 400, "TypeError"),
            ("/sessions/ID/calls", b"x" * 2**24, 413, ""),
        ],
    )
    async def test_wrong_requests_are_refused(self, url, path, body, status, says):
        _, opened = await post(f"{url}/sessions", {"limits": {"output_bytes": 1000}})
        found, answer = await post(url + path.replace("ID", opened["session"]), body)
        assert found == status
        assert says in str(answer)

    async def test_a_client_that_vanishes_loses_its_session_and_a_busy_one_does_not(self):
        async with Served(idle_s=1.0) as url:
            before = launchers()
            gone, there = [await RemoteSandbox.open(url, TOKEN, LIMITS) for _ in range(2)]
            await there.run(Language.SHELL, "sleep 3", timeout_s=10)
            assert launchers() == before + 1
            with pytest.raises(SandboxError, match="status 404: no such session"):
                await gone.run(Language.SHELL, "true", timeout_s=1)
            await asyncio.gather(gone.close(), there.close())

    async def test_a_full_service_is_asked_again(self, monkeypatch):
        async with Served(max_sessions=1) as url:
            first = await RemoteSandbox.open(url, TOKEN, LIMITS)
            second = asyncio.create_task(RemoteSandbox.open(url, TOKEN, LIMITS))
            await asyncio.sleep(0.3)
            assert not second.done()
            await first.close()
            await (await second).close()
            third = await RemoteSandbox.open(url, TOKEN, LIMITS)
            monkeypatch.setattr("lockstep.integrations.sandbox.remote_sandbox.OPEN_TIMEOUT_S", 1.0)
            with pytest.raises(SandboxError, match="full for 1 s"):
                await RemoteSandbox.open(url, TOKEN, LIMITS)
            await third.close()

    async def test_the_end_of_a_service_ends_its_programs(self):
        before, name = launchers(), mark("s")
        async with Served() as url:
            sandbox = await RemoteSandbox.open(url, TOKEN, LIMITS)
            text = named(name) + "time.sleep(60)"
            call = asyncio.create_task(sandbox.run(Language.PYTHON, text, timeout_s=10))
            await asyncio.to_thread(wait_until, lambda: processes(name) == 1)
        with pytest.raises(SandboxError):
            await call
        assert (processes(name), launchers()) == (0, before)
        await sandbox.close()

    async def test_a_sandbox_that_is_lost_on_the_server_is_an_error(self, url):
        before = launchers()
        sandbox = await RemoteSandbox.open(url, TOKEN, LIMITS)
        call = asyncio.create_task(sandbox.run(Language.SHELL, "sleep 60", timeout_s=10))
        await asyncio.sleep(0.5)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="status 500: the sandbox ended during a call"):
            await call
        await sandbox.close()
        assert launchers() == before


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /sessions HTTP/1.1\r\nAuthorization: Bearer %s\r\nBroken Header\r\n\r\n",
        b"POST /sessions\x00 HTTP/1.1\r\nAuthorization: Bearer %s\r\n\r\n",
        b"Bearer %s\r\n\r\n",
        b"POST /sessions HTTP/1.1\r\nAuthorization: Bearer %s\r\nContent-Length: x\r\n\r\n",
        b"POST /sessions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_a_malformed_request_does_not_put_the_token_into_the_log(request_bytes: bytes, url: str, caplog: Any):
    caplog.set_level(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request_bytes % TOKEN.encode())
    await writer.drain()
    assert b" 400 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert TOKEN not in caplog.text


class Liar:
    """A server with one answer to every request."""

    def __init__(self, status: int = 200, text: str = "", *, session: str = '{"session": "a1"}', delay_s: float = 0.0):
        self.status, self.text, self.session, self.delay_s = status, text, session, delay_s
        self.seen: list[str] = []

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.path}")
        if request.path == "/sessions" and self.session:
            return web.Response(status=201, text=self.session)
        await asyncio.sleep(self.delay_s)
        return web.Response(status=self.status, text=self.text, headers={"Location": "http://192.0.2.1/"})


RESULT = {"ended": "exited", "status": 0, "stdout": "", "stderr": "", "is_cut": False, "is_stderr_cut": False}


@pytest.mark.parametrize(
    ("liar", "says"),
    [
        (Liar(200, "no"), "not JSON: b'no'"),
        (Liar(200, "[" * 20_000), "not JSON"),
        (Liar(200, "[]"), "not an object"),
        (Liar(200, "{}"), "expected a result with ended"),
        (Liar(200, json.dumps(RESULT | {"status": "0"})), "expected a result with"),
        (Liar(200, json.dumps(RESULT | {"ended": "never"})), "'never' is not a valid"),
        (Liar(200, json.dumps(RESULT | {"more": 1})), "expected a result with"),
        (Liar(200, json.dumps(RESULT | {"stdout": "x" * 10**6})), "more than"),
        (Liar(302, "{}"), "status 302"),
        (Liar(500, '{"error": "its reason"}'), "status 500: its reason"),
        (Liar(200, "{}", delay_s=30.0), "no answer to POST in 0.6 s"),
        (Liar(session='{"session": 7}'), "found session 7"),
        (Liar(session='{"session": "../../etc"}'), "found session '../../etc'"),
        (Liar(session='{"session": ""}'), "found session ''"),
        (Liar(session="no"), "not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_service_that_lies_is_an_error(liar, says, monkeypatch):
    monkeypatch.setattr("lockstep.integrations.sandbox.remote_sandbox.ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr("lockstep.integrations.sandbox.remote_sandbox.CLOSE_TIMEOUT_S", 0.5)
    async with liar as url:
        with pytest.raises(SandboxError, match=f"sandbox service .*{re.escape(says)}"):
            await open_and_run(url)
        opened = "a1" in liar.session
        assert liar.seen[-1] == ("DELETE /sessions/a1" if opened else "POST /sessions")


async def open_and_run(url: str) -> None:
    sandbox = await RemoteSandbox.open(url, TOKEN, LIMITS)
    try:
        await sandbox.run(Language.SHELL, "true", timeout_s=0.1)
    finally:
        await sandbox.close()


async def test_a_service_that_is_gone_costs_the_rollout_and_is_found_before_the_run():
    environment = make_environment("sandbox", sandbox="remote", url="http://127.0.0.1:9")
    assert "Cannot connect" in str(await environment.problem())  # type: ignore[union-attr]
    rollout = await play(environment, script(tool_call("shell", command="ls")))
    assert rollout.status is RolloutStatus.FAILED
    assert "EnvironmentFault: sandbox: sandbox service http://127.0.0.1:9/sessions: " in str(rollout.error)


async def test_others_reach_a_service_only_with_a_token():
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 without a token .* set --token-env"):
        await SandboxService(make, token=None, limits=LIMITS, max_sessions=1, idle_s=1.0).start("0.0.0.0", 0)


SCRIPT = str(ROOT / "scripts/serve_sandbox.py")


@pytest.fixture
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The script, with a token."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_TOKEN": TOKEN}
    command = [sys.executable, SCRIPT, "--port", "0", "--token-env", "TEST_TOKEN", "--idle-s", "60"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1], process
    process.kill()
    process.wait()


@contained
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_the_script_serves_and_its_end_leaves_no_process(served, number):
    url, process = served
    name = mark("r")
    sandbox = await RemoteSandbox.open(url, TOKEN, LIMITS)
    assert (await sandbox.run(Language.PYTHON, "print(6 * 7)", timeout_s=5)).stdout == "42\n"
    call = asyncio.create_task(sandbox.run(Language.PYTHON, named(name) + "time.sleep(60)", timeout_s=10))
    await asyncio.to_thread(wait_until, lambda: processes(name) == 1)
    started = time.monotonic()
    process.send_signal(number)
    assert await asyncio.to_thread(process.wait, 20) == (-9 if number is signal.SIGKILL else 0)
    assert time.monotonic() - started < 8
    with pytest.raises(SandboxError):
        await call
    await asyncio.to_thread(wait_until, lambda: processes(name) == 0)
    await sandbox.close()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--host", "0.0.0.0"], "without a token"),
        (["--token-env", "NO_SUCH"], "--token-env: NO_SUCH is not set"),
        (["--memory-mib", "0"], "memory_mib=0 must be an integer above 0"),
        (["--max-sessions", "0"], "set both above 0"),
    ],
)
def test_the_script_refuses_in_a_sentence(words, sentence):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, SCRIPT, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("lockstep: ")
    assert sentence in done.stderr
