"""Reward functions in processes of their own, which can be killed.

Covered, each as an outcome of its own and with a new process for the next call: a function that hangs (in Python, in
C, or with SIGTERM ignored) is killed with its process group after the wall-clock limit; one that ends its process,
or is ended by the kernel, has crashed; memory beyond the limit is a MemoryError or a crash; what it prints is read,
never more than its end is kept; what it changes is a copy. No process is left when the pool is closed, when the
trainer exits, or when the trainer is killed.

Not covered: this is protection against accidents, not against attacks. A reward function has the rights of the
trainer (files, network, environment); only `rewards/sandbox/sandbox.py` takes them away. A process that a function
starts in a session of its own (setsid) is not in the group that is killed. Shared memory does not count toward the
limit.

    trainer ── request: function, settings, rollouts as JSON ──►  rewards/workers/worker.py
            ◄──────────────── verdicts as JSON ─────────────────
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rewards.outcomes import Outcome, Verdict
from rewards.workers.frames import LENGTH, MAX_REPLY_BYTES, RECEIVED
from rollout.errors import ConfigError, RewardError
from rollout.records import Rollout
from rollout.saved_rollouts import to_json

KEPT_OUTPUT_BYTES = 2000
"""Of what a function prints, the end: enough for the last lines of a traceback."""
CANCEL_POLL_S = 0.1
"""How soon a cancelled call gives up its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Where reward functions run."""

    mode: Literal["process", "thread"] = "process"
    """Of functions from files. Built-ins that may hang always have a process, the others a thread."""
    workers: int = 4
    """Processes at most; they start when they are needed."""
    memory_gib: float = 4.0
    """Private memory of one process; 0: no limit."""
    start_timeout_s: float = 120.0
    """For starting a process and loading the function's file (which may import torch), apart from the call's limit."""

    def __post_init__(self) -> None:
        if self.mode not in ("process", "thread"):
            raise ConfigError(f"reward.isolation={self.mode}: expected process or thread; set reward.isolation=process")
        if self.workers < 1 or self.memory_gib < 0 or self.start_timeout_s <= 0:
            raise ConfigError(
                f"reward.workers={self.workers} must be at least 1, reward.memory_gib={self.memory_gib} not negative, "
                f"and start_timeout_s={self.start_timeout_s} positive"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedReward:
    """A reward function by its name, which workers of the pool look up."""

    pool: WorkerPool
    spec: str
    """A built-in name, or `/absolute/path.py:name`."""
    settings: Mapping[str, Any]
    is_batch: bool

    async def judge(self, rollouts: Sequence[Rollout], *, timeout_s: float) -> list[Verdict]:
        """One verdict per rollout, of one call (batch functions) or of one call per rollout. Never raises for what
        the function does."""
        batches = [list(rollouts)] if self.is_batch else [[rollout] for rollout in rollouts]
        answers = await asyncio.gather(
            *(self.pool.judge(self.spec, self.settings, batch, timeout_s=timeout_s) for batch in batches)
        )
        return [verdict for verdicts in answers for verdict in verdicts]


class WorkerPool:
    """Processes that are started on demand, reused, and replaced when they die. Independent of event loops."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._threads = ThreadPoolExecutor(isolation.workers, thread_name_prefix="reward-worker")
        self._workers = _Workers()
        # Also at exit of the interpreter, and when nobody holds the pool any more.
        self._finalizer = weakref.finalize(self, self._workers.close)

    def load(self, spec: str, settings: Mapping[str, Any]) -> IsolatedReward:
        """The function, looked up once in a worker. Raises `ConfigError` if it cannot be loaded or configured."""
        worker = self._workers.acquire(self._isolation)
        try:
            is_batch = worker.load(spec, settings, self._isolation.start_timeout_s, threading.Event())
        except (_Died, _TimedOut) as error:
            worker.kill()
            raise ConfigError(f"reward {spec} cannot be loaded: {error}") from None
        finally:
            self._workers.release(worker)
        return IsolatedReward(pool=self, spec=spec, settings=settings, is_batch=is_batch)

    async def judge(
        self, spec: str, settings: Mapping[str, Any], rollouts: Sequence[Rollout], *, timeout_s: float
    ) -> list[Verdict]:
        """Verdicts of one call of the function. The limit counts from the moment the function is called."""
        cancelled = threading.Event()
        payload = [to_json(rollout) for rollout in rollouts]
        future = self._threads.submit(self._judge, spec, settings, payload, timeout_s, cancelled)
        try:
            return await asyncio.wrap_future(future)
        finally:
            cancelled.set()

    def close(self) -> None:
        """Kill all workers. Idempotent."""
        self._finalizer()
        self._threads.shutdown(wait=False)

    def _judge(
        self,
        spec: str,
        settings: Mapping[str, Any],
        payload: list[dict[str, Any]],
        timeout_s: float,
        cancelled: threading.Event,
    ) -> list[Verdict]:
        worker = self._workers.acquire(self._isolation)
        is_new = worker.is_new
        request = {"do": "judge", "spec": spec, "settings": settings, "rollouts": payload}
        try:
            worker.load(spec, settings, self._isolation.start_timeout_s, cancelled)
            reply = worker.ask(request, timeout_s, cancelled)
            verdicts = _verdicts(reply, len(payload))
            if reply.get("retire"):
                worker.kill()
            return verdicts
        except _TimedOut as error:
            worker.kill()
            problem = Verdict(outcome=Outcome.TIMEOUT, detail=str(error))
        except ConfigError as error:  # the file has changed since it was loaded first, or fails every other time
            problem = Verdict(outcome=Outcome.EXCEPTION, detail=str(error)[:500])
        except _DiedIdle as error:
            worker.kill()
            if not is_new:
                return self._judge(spec, settings, payload, timeout_s, cancelled)
            problem = Verdict(outcome=Outcome.CRASHED, detail=str(error))
        except _Died as error:
            worker.kill()
            problem = Verdict(outcome=Outcome.CRASHED, detail=str(error))
        finally:
            self._workers.release(worker)
        return [problem] * len(payload)


class _Died(Exception):
    """The process is gone, or writes what no worker writes."""


class _DiedIdle(_Died):
    """It died before it had read the request: whatever ended it, it was not the function that it was to call."""


class _TimedOut(Exception):
    """No answer in time."""


@dataclass(slots=True)
class _Workers:
    """All processes of a pool, and which of them are idle."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    all: list[_Worker] = field(default_factory=list)
    idle: list[_Worker] = field(default_factory=list)
    is_closed: bool = False

    def acquire(self, isolation: Isolation) -> _Worker:
        """An idle worker that lives, or a new one."""
        while True:
            with self.lock:
                if self.is_closed:
                    raise RewardError("the reward workers are closed")
                if not self.idle:
                    worker = _Worker(isolation.memory_gib)
                    self.all.append(worker)
                    return worker
                worker = self.idle.pop()
            if worker.is_alive:
                return worker
            worker.kill()
            self.release(worker)

    def release(self, worker: _Worker) -> None:
        with self.lock:
            if worker.is_killed or self.is_closed:
                self.all = [other for other in self.all if other is not worker]
            else:
                self.idle.append(worker)

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            for worker in self.all:
                worker.kill()


class _Worker:
    """One process. Used by one thread at a time; any thread may kill it."""

    def __init__(self, memory_gib: float) -> None:
        self._connection, theirs = socket.socketpair()
        life, self._life = os.pipe()
        command = [sys.executable, "-P", "-m", "rewards.workers.worker", str(theirs.fileno()), str(life)]
        self._process = subprocess.Popen(
            [*command, str(int(memory_gib * 2**30))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), life),
            start_new_session=True,  # a group that can be killed as a whole, out of reach of the terminal's Ctrl-C
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        os.close(life)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._tail = b""
        self._loaded: dict[str, bool] = {}
        self._kill_lock = threading.Lock()
        self.is_killed = False
        self._connection.setblocking(False)
        os.set_blocking(self._output.fileno(), False)

    @property
    def is_new(self) -> bool:
        """Whether it has not loaded anything yet."""
        return not self._loaded

    @property
    def is_alive(self) -> bool:
        """Whether it waits for a request: an idle worker that wrote or closed anything is broken.

        A process that was just killed still looks alive until its last thread has ended; see `_DiedIdle`.
        """
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._process.poll() is None
        except OSError:
            return False
        return False

    def load(self, spec: str, settings: Mapping[str, Any], timeout_s: float, cancelled: threading.Event) -> bool:
        """Have it look a function up, once. Returns whether the function takes batches; raises as `ask`, and
        `ConfigError` with the worker's reason."""
        key = json.dumps([spec, settings], default=str)
        if key not in self._loaded:
            try:
                reply = self.ask({"do": "load", "spec": spec, "settings": settings}, timeout_s, cancelled)
            except _TimedOut:
                raise _TimedOut(f"loading {spec} took longer than {timeout_s:g} s") from None
            if "error" in reply:
                raise ConfigError(str(reply["error"]))
            self._loaded[key] = bool(reply.get("is_batch"))
        return self._loaded[key]

    def ask(self, request: Mapping[str, Any], timeout_s: float, cancelled: threading.Event) -> dict[str, Any]:
        """Send a request, wait for the reply, and keep the end of what is printed meanwhile.

        Raises:
            _TimedOut: no reply in time, or the caller no longer wants one.
            _DiedIdle: the process ended before it had read the request.
            _Died: the process ended later, or sent something else than a reply.
        """
        body = json.dumps(request, default=_plain).encode()
        unsent = memoryview(LENGTH.pack(len(body)) + body)
        received = bytearray()
        died: type[_Died] = _DiedIdle
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            selector.register(self._output, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0 or cancelled.is_set():
                    raise _TimedOut(f"no answer in {timeout_s:g} s{self._said()}")
                for key, events in selector.select(min(left, CANCEL_POLL_S)):
                    if key.fileobj is self._output:
                        if not self._drain():
                            selector.unregister(self._output)
                        continue
                    try:
                        if events & selectors.EVENT_WRITE and unsent:
                            unsent = unsent[self._connection.send(unsent) :]
                            if not unsent:
                                selector.modify(self._connection, selectors.EVENT_READ)
                        if events & selectors.EVENT_READ:
                            chunk = self._connection.recv(2**20)
                            if not chunk:
                                raise died(self._obituary())
                            received += chunk
                    except ConnectionError:
                        raise died(self._obituary()) from None
                if died is _DiedIdle and received.startswith(RECEIVED):
                    died = _Died
                    del received[: len(RECEIVED)]
                if (reply := _parse(received)) is not None:
                    return reply

    def kill(self) -> None:
        """End it and everything in its process group, and wait for its end. Idempotent."""
        with self._kill_lock:
            if self.is_killed:
                return
            self.is_killed = True
            with contextlib.suppress(ProcessLookupError):
                # Before it is waited for: until then the number of its group cannot be anybody else's.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._life)

    def _drain(self) -> bool:
        """Read what was printed and keep the end of it. False when nobody can print any more."""
        try:
            chunk = os.read(self._output.fileno(), 2**20)
        except BlockingIOError:
            return True
        self._tail = (self._tail + chunk)[-KEPT_OUTPUT_BYTES:]
        return bool(chunk)

    def _said(self) -> str:
        text = self._tail.decode(errors="replace").strip()
        return f"; its output ends: {text[-300:]}" if text else ""

    def _obituary(self) -> str:
        self._drain()
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"its process closed the connection{self._said()}"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        return f"its process {how}{self._said()}"


def _parse(received: bytearray) -> dict[str, Any] | None:
    """The reply, once it is whole. Raises `_Died` for what is none."""
    if len(received) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(received)
    if length > MAX_REPLY_BYTES:
        raise _Died(f"its process announced a reply of {length} bytes; verdicts have some hundred")
    if len(received) < LENGTH.size + length:
        return None
    try:
        reply = json.loads(received[LENGTH.size :])
    except (ValueError, RecursionError):
        raise _Died("its process sent something that is not a reply") from None
    if not isinstance(reply, dict):
        raise _Died("its process sent something that is not a reply")
    return reply


def _verdicts(reply: Mapping[str, Any], count: int) -> list[Verdict]:
    """Of so many rollouts. Raises `_Died` for anything else: it comes from a process that runs anything."""
    try:
        verdicts = [_verdict(entry) for entry in reply["verdicts"]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise _Died(f"its process sent something that is no verdict ({type(error).__name__}: {error})") from None
    if len(verdicts) != count:
        raise _Died(f"its process sent {len(verdicts)} verdicts for {count} rollouts")
    return verdicts


def _verdict(entry: Mapping[str, Any]) -> Verdict:
    outcome, value = Outcome(entry["outcome"]), float(entry["value"])
    if (outcome is Outcome.VALUE) != math.isfinite(value):
        raise ValueError(f"a verdict {outcome} with value {value}")
    return Verdict(outcome=outcome, value=value, detail=str(entry["detail"])[:500])


def _plain(value: Any) -> Any:
    """Arrays and scalars of data sets as JSON knows them; anything else as text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
