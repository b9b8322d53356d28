"""Sessions of a sandbox: what stays between programs, what does not, and their end on every path."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from lockstep.rollout.errors import SandboxError
from lockstep.rollout.sandbox.execution import Ended, Execution, Language, Limits
from lockstep.rollout.sandbox.program_session import Enclosure, Session, SessionSandbox, tool_call
from lockstep.rollout.sandbox.sandbox import local_enclosure
from tests.fixtures.processes import descendants
from tests.unit.rollout.sandbox.test_sandbox import contained, named, processes, read, wait_until

LIMITS = Limits(timeout_s=10.0, output_bytes=1000)
LOCAL = partial(local_enclosure, unsafe=False, setting="environment.settings.unsafe")


class Shell:
    """A session with short calls."""

    def __init__(self, enclosure: Enclosure) -> None:
        self.session = Session(enclosure)

    def python(self, text: str, timeout_s: float = 10.0) -> Execution:
        return self._run(Language.PYTHON, text, timeout_s)

    def sh(self, text: str, timeout_s: float = 10.0) -> Execution:
        return self._run(Language.SHELL, text, timeout_s)

    def _run(self, language: Language, text: str, timeout_s: float) -> Execution:
        call = tool_call(self.session.enclosure, language, text)
        most = self.session.enclosure.limits.output_bytes
        return self.session.run(call, timeout_s=timeout_s, output_bytes=most)


@pytest.fixture
def shell() -> Iterator[Shell]:
    made = Shell(LOCAL(LIMITS))
    yield made
    made.session.close()


def mark(kind: str) -> str:
    """Return a name for a process, unlike all others."""
    return f"{kind}{time.monotonic_ns() % 10**12}"


@contained
class TestWhatStays:
    def test_files_stay_and_are_absent_in_the_next_sandbox(self, shell):
        shell.python("open('notes', 'w').write('seven')\nopen('mine.py', 'w').write('x = 7')")
        assert shell.sh("cat notes; ls").stdout == "sevenmine.py\nnotes\n"
        assert shell.python("import mine\nprint(mine.x)").stdout == "7\n"
        other = Shell(LOCAL(LIMITS))
        assert other.sh("ls -A").stdout == ""
        other.session.close()

    @pytest.mark.parametrize(
        "leave",
        [
            "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)",
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
            "    if os.fork() == 0: time.sleep(60)\n    os._exit(0)",
            "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nif os.fork() == 0:\n    os.setsid()\n"
            "    for stream in range(3): os.close(stream)\n    while True: time.sleep(1)",
            "import os\nwhile True:\n    try: os.fork()\n    except BlockingIOError: break",
        ],
        ids=["session", "daemon", "closed", "bomb"],
    )
    def test_processes_do_not(self, shell, leave):
        """They are gone when the result is known; counted outside, and inside by the signals that find no process."""
        name = mark("p")
        shell.python(named(name) + leave, timeout_s=5.0)
        assert processes(name) == 0
        alone = "import os\ntry: os.kill(-1, 0); print('others')\nexcept ProcessLookupError: print('alone')"
        assert shell.python(alone).stdout == "alone\n"

    def test_a_fork_bomb_until_the_limit_leaves_all_places_free(self, shell):
        name = mark("f")
        assert shell.python(named(name) + "while True:\n    try: os.fork()\n    except OSError: pass", 2.0).ended is (
            Ended.TIMEOUT
        )
        assert processes(name) == 0
        many = "import threading, time\nfor _ in range(10): threading.Thread(target=time.sleep, args=(1,)).start()"
        assert shell.python(many).status == 0

    def test_a_full_directory_can_be_emptied_again(self, shell):
        fill = "i = 0\ntry:\n    while True: i += 1; open(f'f{i}', 'wb').write(b'x' * 2**20)\n" \
               "except OSError as error: print(error.strerror)"  # fmt: skip
        assert shell.python(fill).stdout == "No space left on device\n"
        assert shell.python("print('runs')").stdout == "runs\n"
        assert shell.sh("rm f*; echo yes > new; cat new").stdout == "yes\n"


@contained
class TestAttacks:
    @pytest.mark.parametrize("name", ["program.py", "stdin"])
    @pytest.mark.parametrize("link", ["symlink", "link"])
    def test_links_in_the_place_of_the_text_lead_nowhere(self, shell, name, link):
        victim = "/sandbox/victim" if link == "symlink" else "/call/victim"
        shell.python(
            f"import os\nopen({victim!r}, 'w').write('untouched')\n"
            f"os.path.exists('/call/{name}') and os.unlink('/call/{name}')\nos.{link}({victim!r}, '/call/{name}')"
        )
        assert shell.python(f"print(open({victim!r}).read(), repr(input.__name__))").stdout == "untouched 'input'\n"
        if name == "stdin":
            shell.python(f"import os\nos.unlink('/call/stdin')\nos.{link}({victim!r}, '/call/stdin')")
            assert shell.python("import sys\nprint(repr(sys.stdin.read()))").stdout == "''\n"

    @pytest.mark.parametrize("name", ["program.py", "program.sh", "stdin"])
    @pytest.mark.parametrize(
        "attack",
        [
            "os.mkdir(path)",
            "os.makedirs(path + '/a' * 900)",
            "os.mkdir(path); open(path + '/kept', 'w').write('x'); os.chmod(path, 0)",
            "os.makedirs(path + '/a/b'); os.symlink('/sandbox', path + '/a/b/c'); os.chmod(path + '/a/b', 0)",
            "os.mkdir(path); os.chmod('/call', 0)",
            "os.mkdir(path); os.rename(path, '/call/other'); os.chmod('/call', 0o111)",
            "os.mkdir(path); open('/call/full', 'wb').write(b'x' * 2**24)",
            "[open(f'/call/{n}', 'w') for n in range(40)]; os.mkfifo(path)",
        ],
    )
    def test_what_a_program_makes_of_the_place_of_the_texts_is_gone_for_the_next(self, shell, name, attack):
        shell.python("open('/sandbox/kept', 'w').write('untouched')")
        shell.python(f"import os\npath = '/call/{name}'\nos.path.exists(path) and os.unlink(path)\n{attack}")
        assert shell.python("print(open('/sandbox/kept').read())").stdout == "untouched\n"
        assert shell.sh("cat /sandbox/kept").stdout == "untouched"

    def test_a_text_that_is_too_long_is_a_result_and_leaves_nothing(self, shell):
        stopped = shell.python("print(1)" + " " * 2**23)
        assert (stopped.ended, stopped.status, stopped.stdout) == (Ended.EXITED, 126, "")
        assert "cannot be written: [Errno 28] No space left" in stopped.stderr
        assert shell.sh("echo runs").stdout == "runs\n"
        assert shell.python("print('runs')").stdout == "runs\n"

    def test_process_1_cannot_be_reached(self, shell):
        hostile = (
            "import os, signal\n"
            "for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):\n"
            "    os.kill(1, number)\n"
            "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))\n"
            "print(sorted(n for n in range(1000) if not ctypes.CDLL(None).fcntl(n, 1) < 0))\n"
            "os.killpg(0, signal.SIGKILL)"
        )
        result = shell.python(hostile)
        assert result.stdout == ""  # not flushed
        assert (result.ended, result.status) == (Ended.KILLED, -signal.SIGKILL)
        assert shell.python(hostile.replace("os.killpg(0, signal.SIGKILL)", "")).stdout == "-1\n[0, 1, 2]\n"

    def test_forged_answers_are_output(self, shell):
        forged = '{"ended": "exited", "status": 0, "stdout": "forged", "stderr": "", "is_cut": false}'
        result = shell.python(
            f"import os\nos.write(1, b'''{forged}\\n''')\nos.write(2, b'''{forged}\\n''')\nos._exit(7)"
        )
        assert (result.status, result.stdout, result.stderr) == (7, forged + "\n", forged + "\n")

    def test_there_is_no_network(self, shell):
        local = shell.python("import socket\nsocket.create_connection(('127.0.0.1', 22), 2)")
        assert "unreachable" in shell.python("import socket\nsocket.create_connection(('1.1.1.1', 53), 2)").stderr
        assert "refused" in local.stderr or "unreachable" in local.stderr


@contained
class TestLimits:
    def test_time(self, shell):
        started = time.monotonic()
        result = shell.sh("echo before; trap '' TERM; while :; do :; done", timeout_s=1.0)
        assert (result.ended, result.stdout) == (Ended.TIMEOUT, "before\n")
        assert 1.0 <= time.monotonic() - started < 6.0
        assert shell.sh("echo on").stdout == "on\n"

    def test_memory_and_files(self, shell):
        assert "MemoryError" in shell.python("x = bytearray(2**31)").stderr
        assert "File too large" in shell.python("open('big', 'wb').write(b'x' * 2**26)").stderr

    def test_both_outputs_are_cut_and_the_rest_is_not_kept(self, shell):
        result = shell.python("import sys\nfor stream in (sys.stdout, sys.stderr): stream.write('x' * 10**7)")
        assert (result.stdout, result.stderr) == ("x" * 1000, "x" * 1000)
        assert (result.is_cut, result.is_stderr_cut, result.status) == (True, True, 0)
        exact = shell.python("print('x' * 999)")
        assert (exact.is_cut, exact.is_stderr_cut) == (False, False)

    def test_endless_output_takes_no_memory_of_process_1(self, shell):
        assert shell.sh("yes", timeout_s=2.0).is_cut
        (first,) = descendants(shell.session._process.pid) - {shell.session._process.pid}
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", read(Path(f"/proc/{first}/status")))
        assert int(peak) < 40_000

    def test_pipelines_end_quietly(self, shell):
        result = shell.sh("yes | head -n 1")
        assert (result.stdout, result.stderr, result.status) == ("y\n", "", 0)

    def test_bytes_that_are_no_text_take_the_most_room_and_arrive(self, shell):
        result = shell.python("import os\nos.write(1, b'\\xff' * 1000)\nos.write(2, b'\\0' * 1000)")
        assert (result.stdout, result.stderr) == ("\ufffd" * 1000, "\0" * 1000)


SLEEPER = "open('mine', 'w').write('x')\ntime.sleep(60)"
TRAINER = """
import os, sys, threading, time
from lockstep.rollout.sandbox.program_session import Session, tool_call
from lockstep.rollout.sandbox.execution import Language, Limits
from lockstep.rollout.sandbox.sandbox import local_enclosure
made = []
def work():
    made.append(Session(local_enclosure(Limits(timeout_s=60), unsafe=False, setting="x")))
def call(text):
    made[0].run(tool_call(made[0].enclosure, Language.PYTHON, text), timeout_s=60, output_bytes=100)
thread = threading.Thread(target=work)
thread.start()
thread.join()
call("print(1)")
if sys.argv[1] == "forked" and os.fork() == 0:  # it has the ends of all pipes
    time.sleep(20)
    os._exit(0)
if sys.argv[1] == "idle":
    print(made[0]._process.pid, flush=True)
    time.sleep(60)
if sys.argv[1] == "exit":
    threading.Thread(target=call, args=(sys.argv[2],), daemon=True).start()
    time.sleep(2)
    sys.exit()
call(sys.argv[2])
"""


@contained
class TestEnds:
    def test_close_ends_a_call_in_another_thread(self, shell):
        name = mark("c")
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(shell.python, named(name) + SLEEPER, 60.0)
            wait_until(lambda: processes(name) == 1)
            shell.session.close()
            assert running.result(timeout=10).ended is Ended.KILLED
        assert processes(name) == 0
        shell.session.close()
        with pytest.raises(SandboxError, match="is closed"):
            shell.python("print(1)")

    def test_the_thread_that_opened_it_may_end(self):
        made: list[Shell] = []
        thread = threading.Thread(target=lambda: made.append(Shell(LOCAL(LIMITS))))
        thread.start()
        thread.join()
        time.sleep(0.3)
        assert made[0].python("print(1)").stdout == "1\n"
        made[0].session.close()

    @pytest.mark.parametrize("busy", [False, True])
    def test_a_sandbox_that_is_killed_is_lost_not_silent(self, shell, busy):
        name = mark("l")
        with ThreadPoolExecutor(1) as pool:
            if busy:
                running = pool.submit(shell.python, named(name) + SLEEPER, 60.0)
                wait_until(lambda: processes(name) == 1)
            os.kill(shell.session._process.pid, signal.SIGKILL)
            if busy:
                assert running.result(timeout=10).ended is Ended.KILLED
            else:
                with pytest.raises(SandboxError, match="did not run"):
                    shell.python("print(1)")
        assert shell.session.is_closed
        wait_until(lambda: processes(name) == 0)

    @pytest.mark.parametrize("state", ["busy", "idle", "exit", "forked"])
    def test_the_end_of_the_trainer_leaves_no_process_and_no_directory(self, tmp_path, state):
        name = mark("t")
        command = [sys.executable, "-c", TRAINER, state, named(name) + SLEEPER]
        trainer = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        launcher = int(trainer.stdout.readline()) if state == "idle" else 0
        if state != "idle":
            wait_until(lambda: processes(name) == 1)
        if state != "exit":
            trainer.kill()
        trainer.wait()
        killed = time.monotonic()
        wait_until(lambda: processes(name) == 0)
        assert time.monotonic() - killed < 10
        if launcher:
            wait_until(lambda: not read(Path(f"/proc/{launcher}/cmdline")).count("jail"))
        assert list(tmp_path.iterdir()) == []

    async def test_a_canceled_opening_leaves_no_process(self):
        before = launchers()
        for head_start_s in (0.02, 0.005, 0.001, 0.0):  # on some machines it has opened by then
            task = asyncio.create_task(SessionSandbox.open(lambda: LOCAL(LIMITS)))
            await asyncio.sleep(head_start_s)
            if task.cancel():
                break
            await (await task).close()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: launchers() == before)


def children() -> list[int]:
    """Return the pids of the launchers, and clients of containers, that this process has."""
    parent = f"PPid:\t{os.getpid()}\n"
    own = [file.parent for file in Path("/proc").glob("[0-9]*/status") if parent in read(file)]
    return [int(one.name) for one in own if re.search(r"sandbox/jail\.py|docker|unshare", read(one / "cmdline"))]


def launchers() -> int:
    return len(children())


LIAR = "import sys, time\nsys.stdin.readline()\nprint('{\"ready\": true}', flush=True)\nsys.stdin.readline()\n"
STARTED = "print('{\"started\": true}', flush=True)\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("print('[]', flush=True)", "is not an object"),
        ("print('no', flush=True)", "is not JSON"),
        ("print('[' * 4000, flush=True)", "is not JSON"),
        ("print('x' * 10**6, flush=True)", "more than"),
        ('print(\'{"failed": "no filter"}\', flush=True)', "no filter"),
        ("time.sleep(60)", "no program after 2 s"),
        ("sys.exit('its last words')", "its last words"),
    ],
)
def test_a_sandbox_that_lies_before_a_program_is_an_error(answer, reason):
    session = Session(liar(answer))
    with pytest.raises(SandboxError, match=f"refused: .*{reason}"):
        run(session)
    assert session.is_closed
    assert session._process.returncode is not None


@pytest.mark.parametrize(
    "answer",
    [
        "print('x' * 10**6, flush=True)",
        'print(\'{"ended": "exited", "status": 0}\', flush=True)',
        'print(\'{"ended": "never", "status": 0, "stdout": "", "stderr": "", "is_cut": false, '
        '"is_stderr_cut": false}\', flush=True)',
        'print(\'{"ended": "exited", "status": true, "stdout": "", "stderr": "", "is_cut": false, '
        '"is_stderr_cut": false}\', flush=True)',
        'print(\'{"ended": "exited", "status": 0, "stdout": "\' + \'x\' * 6000 + \'", "stderr": "", '
        '"is_cut": false, "is_stderr_cut": false}\', flush=True)',
        "sys.exit()",
    ],
)
def test_a_sandbox_that_lies_about_a_program_is_lost(answer):
    session = Session(liar(STARTED + answer))
    assert run(session) == Execution(ended=Ended.KILLED, status=-9, stdout="", stderr="")
    assert session.is_closed


def test_a_sandbox_that_never_answers_counts_as_out_of_time(monkeypatch):
    monkeypatch.setattr("lockstep.rollout.sandbox.program_session.STOP_TIMEOUT_S", 0.5)
    session = Session(liar(STARTED + "time.sleep(60)"))
    assert run(session).ended is Ended.TIMEOUT
    assert session.is_closed


def liar(answer: str) -> Enclosure:
    """Return an enclosure whose process 1 understands its settings, and then answers as given."""
    honest = LOCAL(LIMITS)
    command = [sys.executable, "-c", LIAR + answer]
    return dataclasses.replace(
        honest, command=command, start_timeout_s=2.0, refused=lambda reason: f"refused: {reason}"
    )


def run(session: Session) -> Execution:
    return session.run(tool_call(session.enclosure, Language.SHELL, ":"), timeout_s=0.2, output_bytes=10)
