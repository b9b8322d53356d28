"""Programs of a model in the sandbox. Most tests need a system with namespaces. Attacks are in `tests/hostile/`."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lockstep.rollout.sandbox.sandbox
from lockstep.rollout.errors import ConfigError, SandboxError
from lockstep.rollout.sandbox.execution import Ended, Limits
from lockstep.rollout.sandbox.sandbox import isolation_problem, run_python

IS_ISOLATED = isolation_problem() is None
contained = pytest.mark.skipif(not IS_ISOLATED, reason="this system allows no namespaces")

# Runs without namespaces only where the test says so: the program is the test's own.
WORKER = """
import os, sys
from lockstep.rollout.sandbox.execution import Limits
from lockstep.rollout.sandbox.sandbox import run_python
unsafe = sys.argv[1] == "without"
if unsafe:
    os.geteuid = lambda: 1000
print(run_python(sys.argv[2], limits=Limits(timeout_s=60), unsafe=unsafe).stdout)
"""


@pytest.fixture
def worker(tmp_path) -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """Start a process that runs a program, with temporary files in `tmp_path`; kill it after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(namespaces: str, source: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, namespaces, source]
        process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process group, as the pool kills a reward worker."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes(name: str) -> int:
    """Return the number of processes with this name (`prctl(PR_SET_NAME)`)."""
    return sum(read(file) == name + "\n" for file in Path("/proc").glob("[0-9]*/comm"))


def read(file: Path) -> str:
    """Return the text of a file in /proc; empty if its process has ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def named(name: str) -> str:
    """Return the beginning of a program that `processes` finds by its name."""
    return f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, b'{name}')\n"


def test_output_status_and_input():
    result = run_python("import sys\nprint(input()[::-1])\nprint('x', file=sys.stderr)\nsys.exit(3)", stdin="abc")
    assert (result.ended, result.status, result.stdout, result.stderr) == (Ended.EXITED, 3, "cba\n", "x\n")


def test_a_program_that_hangs_is_killed_with_its_children():
    marker = f"7{time.monotonic_ns()}"
    source = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({marker})'], start_new_session=True)\n"
        "time.sleep(60)"
    )
    started = time.monotonic()
    assert run_python(source, limits=Limits(timeout_s=1.5)).ended is Ended.TIMEOUT
    assert time.monotonic() - started < 10
    if IS_ISOLATED:
        time.sleep(0.2)
        commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
        assert not any(marker.encode() in command for command in commands)


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = run_python("import os\nprint(sorted(os.environ))")
    assert "SECRET_TOKEN" not in result.stdout
    assert result.stdout.strip() == "['HOME', 'LANG', 'PATH']"
    parents = "import os\nfor p in os.listdir('/proc'):\n    try: print(open(f'/proc/{p}/environ').read())\n" \
              "    except OSError: pass"  # fmt: skip
    if IS_ISOLATED:
        assert "hunter2" not in run_python(parents).stdout


@contained
def test_there_is_no_network_not_even_loopback():
    with subprocess.Popen(
        ["python3", "-c", "import socket; s=socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], "
         "flush=True); s.accept()"],
        stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        port = int(server.stdout.readline())
        result = run_python(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('in')")
        assert "in" not in result.stdout.split()
        assert "Network is unreachable" in result.stderr or "Connection refused" in result.stderr
        server.kill()
    assert "print" not in run_python("import socket\nprint(socket.create_connection(('1.1.1.1', 53), 2))").stdout


@contained
def test_files_outside_can_neither_be_read_nor_written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    result = run_python(
        "import os\n"
        f"for path in ({str(secret)!r}, '/etc/passwd', '/home', '/proc/1/root/etc/passwd'):\n"
        "    try: print(open(path).read() if not os.path.isdir(path) else os.listdir(path))\n"
        "    except OSError as error: print(type(error).__name__)\n"
        f"for path in ('/usr/x', '/x', {os.path.realpath('/usr/bin/env')!r}, {str(tmp_path / 'new')!r}):\n"
        "    try: open(path, 'w').write('x'); print('WROTE', path)\n"
        "    except OSError: pass\n"
        "open('mine', 'w').write('x'); print(sorted(os.listdir('.')))"
    )
    assert "hunter2" not in result.stdout
    assert "root:" not in result.stdout
    assert "WROTE" not in result.stdout
    assert result.stdout.splitlines()[-1] == "['mine', 'program.py', 'stdin']"
    assert secret.read_text() == "hunter2"
    assert list(tmp_path.iterdir()) == [secret]


@contained
def test_a_fork_bomb_ends_and_leaves_nothing():
    started = time.monotonic()
    result = run_python("import os\nwhile True:\n    os.fork()", limits=Limits(timeout_s=3.0))
    assert time.monotonic() - started < 15
    assert result.ended is not Ended.EXITED or "BlockingIOError" in result.stderr


@contained
def test_processes_of_another_sandbox_do_not_count_toward_the_limit():
    name = f"b{time.monotonic_ns() % 10**12}"
    bomb = (
        named(name)
        + "try:\n    while os.fork(): pass\nexcept BlockingIOError: print('full', flush=True)\ntime.sleep(60)"
    )
    good = (
        "import threading\nfor _ in range(8):\n    threading.Thread(target=__import__('time').sleep, args=(1,)).start()"
    )
    limits = Limits(timeout_s=8.0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run_python, bomb, limits=limits)
        wait_until(lambda: processes(name) >= limits.processes - 2)  # `unshare` may count as one
        time.sleep(0.3)
        result = run_python(good, limits=limits)
        assert (result.status, result.stderr) == (0, "")
        assert processes(name) >= limits.processes - 2  # the other sandbox ran the whole time
        assert other.result().stdout == "full\n"


def test_root_of_a_container_with_few_user_ids_uses_no_other_user_id():
    container = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*container, "true"], capture_output=True).returncode:
        pytest.skip("this system allows no user namespaces")
    source = "import os\nfrom lockstep.rollout.sandbox import sandbox\nprint(os.geteuid(), sandbox._is_root_of_all())"
    assert subprocess.check_output([*container, sys.executable, "-c", source], text=True) == "0 False\n"


@contained
def test_what_a_program_writes_is_bounded_and_not_on_the_disk():
    source = (
        "import os\ntry:\n    for i in range(100): open(f'f{i}', 'wb').write(b'x' * 2**20)\n"
        "except OSError as error: print(error.strerror, i)\n"
        "for i in range(100):\n    if os.path.exists(f'f{i}'): os.remove(f'f{i}')\n"
        "try:\n    for i in range(10**6): open(f'f{i}', 'w').close()\nexcept OSError as error: print(error.strerror, i)"
    )
    full, many = run_python(source, stdin="x" * 10**6, limits=Limits(disk_mib=8, timeout_s=20.0)).stdout.splitlines()
    assert full.startswith("No space left on device ")
    assert 8 <= int(full.split()[-1]) <= 12  # the input has room of its own, which it may not fill
    assert many.startswith("No space left on device ")
    assert int(many.split()[-1]) < 10_000


@contained
def test_a_killed_worker_leaves_no_files(worker, tmp_path):
    name = f"k{time.monotonic_ns() % 10**12}"
    process = worker("with", f"open('mine', 'w').write('x')\n{named(name)}time.sleep(60)")
    wait_until(lambda: processes(name) == 1)
    kill(process)
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: processes(name) == 0)


def test_without_namespaces_the_next_sandbox_removes_what_a_killed_worker_left(worker, tmp_path):
    source = "import os, time\nos.makedirs('d/e')\nos.chmod('d', 0)\nopen('mine', 'w').write('x')\ntime.sleep(60)"
    killed, alive = worker("without", source), worker("without", source)
    wait_until(lambda: len(list(tmp_path.rglob("mine"))) == 2)
    kill(killed)
    assert len(list(tmp_path.iterdir())) == 2
    assert worker("without", "print(1)").wait() == 0
    assert len(list(tmp_path.rglob("mine"))) == 1  # that of the living worker
    kill(alive)
    assert worker("without", "import os, shutil\nshutil.rmtree(os.getcwd())").wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_memory_files_and_output_are_bounded():
    assert "MemoryError" in run_python("x = bytearray(2**31)").stderr
    assert "File too large" in run_python("open('big', 'wb').write(b'x' * 2**26)").stderr
    result = run_python("print('x' * 10**8)", limits=Limits(timeout_s=20.0, output_bytes=1000))
    assert result.stdout == "x" * 1000
    assert result.is_cut
    exact = run_python("print('x' * 999)", limits=Limits(output_bytes=1000))
    assert (exact.stdout, exact.is_cut) == ("x" * 999 + "\n", False)


def test_as_root_without_namespaces_nothing_is_run(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="not run as root without isolation"):
        run_python("print(1)", unsafe=True)


@contained
def test_a_failure_to_isolate_is_an_error_each_time_and_not_remembered(monkeypatch):
    monkeypatch.setattr(lockstep.rollout.sandbox.sandbox, "refusing_filter", lambda: bytes(8))  # the kernel refuses it
    for _ in range(2):
        with pytest.raises(SandboxError, match=r"did not isolate .* so it did not run; .*code_tests.unsafe=true"):
            run_python("print(1)")
    monkeypatch.undo()
    assert run_python("print(1)").stdout == "1\n"


@contained
def test_a_program_that_was_not_started_in_time_is_an_error_not_a_result(monkeypatch):
    monkeypatch.setattr(lockstep.rollout.sandbox.sandbox, "START_TIMEOUT_S", 0.001)
    with pytest.raises(SandboxError, match="no program after"):
        run_python("print(1)")


@contained
def test_the_kernel_takes_a_program_first_if_memory_runs_out():
    name = f"o{time.monotonic_ns() % 10**12}"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_python, f"{named(name)}time.sleep(2)")
        wait_until(lambda: processes(name) == 1)
        (found,) = [file.parent for file in Path("/proc").glob("[0-9]*/comm") if read(file) == name + "\n"]
        assert read(found / "oom_score_adj") == "1000\n"


@contained
def test_a_program_ends_with_the_process_that_runs_it(worker):
    """Only that process is killed, not its group."""
    name = f"d{time.monotonic_ns() % 10**12}"
    process = worker("with", f"{named(name)}time.sleep(60)")
    wait_until(lambda: processes(name) == 1)
    process.kill()
    wait_until(lambda: processes(name) == 0)


def test_odd_sources_and_inputs_are_run_or_refused_by_the_interpreter():
    assert run_python("# \x00\nprint(1)").status != 0
    assert "1" in run_python("x = '\ud800'\nprint(1)").stdout
    assert run_python("# coding: rot13\ncevag(6 * 7)").status != 0
    large = run_python(
        "import sys\nprint(len(sys.stdin.read()))", stdin="x" * 50_000_000, limits=Limits(timeout_s=30.0)
    )
    assert large.stdout == "50000000\n"


@contained
def test_a_process_with_thousands_of_open_files_can_run_programs():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = []
    try:
        with contextlib.suppress(OSError):  # as many as the system allows: the trainer has sockets and files
            opened += [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        assert run_python("print(1)").stdout == "1\n"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
