"""Pool of killable processes for reward functions.

Covered, each as an outcome of its own and with a new process for the next call: a function that hangs (in Python, in
C, or with SIGTERM ignored) is killed with its process group after the wall-clock limit; one that ends its process, or
is ended by the kernel, has crashed; memory beyond the limit is a MemoryError or a crash. Only the end of the output is
kept. No process is left when the pool is closed, or when the trainer exits or is killed.

A call whose process dies after it has served others is repeated once in a new process, because an earlier function may
have caused it. Each reply names its call.

Not covered: this is protection against accidents, not against attacks. A reward function has the rights of the
trainer (files, network, environment); only `rollout/sandbox/sandbox.py` takes them away. A process that a function
starts in a session of its own (setsid) is not in the group that is killed. Shared memory does not count toward the
limit.

    trainer ── request: function, settings, rollouts as a line of JSON ──►  rewards/workers/worker.py
            ◄────────────────── verdicts as a line of JSON ─────────────

Not a library: process pools such as pebble unpickle replies, so that a function can make the trainer run code, and
leave the children of a function alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lockstep.rewards.batches import Scope
from lockstep.rewards.meter import Meter
from lockstep.rewards.outcomes import Outcome, Verdict, logged_value
from lockstep.rollout.errors import ConfigError, RewardError
from lockstep.rollout.records import Rollout
from lockstep.rollout.rollout_lines import to_json
from lockstep.rollout.system.captured_output import OutputTail
from lockstep.rollout.system.user_functions import COPY

Judged = tuple[list[Verdict], Mapping[str, float], Mapping[str, int]]
"""One verdict per rollout, and sums and counts of what the function measured (`rewards/meter.py`)."""
RECEIVED = b"\n"
"""Sent by a worker as soon as it has read a request: if it dies later, the function ended it."""
MAX_REPLY_BYTES = 16 * 2**20
"""A verdict has some hundred bytes; no worker writes a longer reply."""
CANCEL_POLL_S = 0.1
"""Time in which a cancelled call gives up its worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Where reward functions run."""

    mode: Literal["process", "thread"] = "process"
    """For functions from files. Built-ins that may hang always have a process, the others a thread."""
    workers: int = 4
    """Maximum number of processes; they start when they are needed."""
    memory_gib: float = 4.0
    """Private memory of one process; 0: no limit."""
    start_timeout_s: float = 120.0
    """Limit for starting a process and loading the function's file (which may import torch), apart from the call's."""

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
    scope: Scope

    async def judge(
        self, rollouts: Sequence[Rollout], meter: Meter, *, timeout_s: float, by_turn: bool = False
    ) -> list[Verdict]:
        """Return one verdict per rollout. The limit counts from the moment the function is called.

        meter: gets what the function measures. by_turn: the function may return one number per turn.
        """

        async def call(seen: Sequence[Rollout]) -> list[Verdict]:
            request = {
                "do": "judge",
                "spec": self.spec,
                "settings": self.settings,
                "by_turn": by_turn,
                "num_updates": meter.num_updates,
                "rollouts": [to_json(one, shares_prompts=True) for one in seen],
            }
            verdicts, sums, counts = await self.pool.judge(request, timeout_s)
            meter.merge(sums, counts)
            return verdicts

        return await self.scope.judge(rollouts, call)


class WorkerPool:
    """Processes that are started on demand, reused, and replaced when they die. Independent of event loops."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._threads = ThreadPoolExecutor(isolation.workers, thread_name_prefix="reward-worker")
        self._workers: dict[int, _Worker] = {}
        """By the id of the thread that uses it, so that none is shared."""
        self._is_closed = False
        # Also runs at exit of the interpreter, and when the pool is garbage.
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def load(self, spec: str, settings: Mapping[str, Any]) -> IsolatedReward:
        """Look the function up once in a worker. Raises `ConfigError` if it cannot be loaded or configured."""
        cancellation = threading.Event()
        try:
            scope = self._threads.submit(self._load, spec, settings, cancellation).result()
        finally:
            cancellation.set()
        return IsolatedReward(pool=self, spec=spec, settings=settings, scope=scope)

    async def judge(self, request: Mapping[str, Any], timeout_s: float) -> Judged:
        """Have a worker answer a request of `IsolatedReward.judge`; if this is cancelled, its worker is given up."""
        cancellation = threading.Event()
        future = self._threads.submit(self._judge, request, timeout_s, cancellation)
        try:
            return await asyncio.wrap_future(future)
        finally:
            cancellation.set()

    def close(self) -> None:
        """Kill all workers. Idempotent."""
        self._is_closed = True
        self._finalizer()
        self._threads.shutdown(wait=False)

    def _load(self, spec: str, settings: Mapping[str, Any], cancelled: threading.Event) -> Scope:
        try:
            return self._worker().load(spec, settings, self._isolation.start_timeout_s, cancelled)
        except (_Died, _TimedOut) as error:
            self._drop_worker()
            raise ConfigError(f"reward {spec} cannot be loaded: {error}") from None

    def _judge(
        self, request: Mapping[str, Any], timeout_s: float, cancelled: threading.Event, *, is_retry: bool = False
    ) -> Judged:
        num_turns = [len(rollout["calls"]) for rollout in request["rollouts"]]
        worker = self._worker()
        try:
            worker.load(request["spec"], request["settings"], self._isolation.start_timeout_s, cancelled)
            reply = worker.ask(request, timeout_s, cancelled)
            judgment = _verdicts(reply, num_turns), *_measures(reply)
            worker.has_judged = True
            if reply.get("retire"):
                self._drop_worker()
            return judgment
        except ConfigError as error:  # the file has changed since it was loaded first, or fails every other time
            problem = Verdict(outcome=Outcome.EXCEPTION, detail=str(error)[:500])
        except (_Died, _TimedOut) as error:
            self._drop_worker()
            # In a process that has served other calls, one of these may have done it: a thread that it left behind.
            is_perhaps_of_another = isinstance(error, _DiedIdle) or (isinstance(error, _Died) and worker.has_judged)
            if is_perhaps_of_another and not is_retry:
                return self._judge(request, timeout_s, cancelled, is_retry=True)
            outcome = Outcome.TIMEOUT if isinstance(error, _TimedOut) else Outcome.CRASHED
            problem = Verdict(outcome=outcome, detail=str(error))
        return [problem] * len(num_turns), {}, {}

    def _worker(self) -> _Worker:
        """Return the worker of this thread; start one if it has none that lives."""
        thread = threading.get_ident()
        if thread in self._workers and not self._workers[thread].is_alive:
            self._drop_worker()
        if thread not in self._workers:
            self._workers[thread] = _Worker(self._isolation.memory_gib)
        if self._is_closed:  # asked after the worker is listed: either `close` has killed it, or this does
            self._drop_worker()
            raise RewardError("the reward workers are closed")
        return self._workers[thread]

    def _drop_worker(self) -> None:
        self._workers.pop(threading.get_ident()).kill()


class _Died(Exception):
    """The process is gone, or wrote what no worker writes."""


class _DiedIdle(_Died):
    """The process ended before it had read the request, so the request did not end it."""


class _TimedOut(Exception):
    """No answer in time."""


class _Worker:
    """One process. Used by one thread; any thread may kill it."""

    def __init__(self, memory_gib: float) -> None:
        self._connection, theirs = socket.socketpair()
        life, self._life = os.pipe()
        command = [sys.executable, "-P", "-m", "lockstep.rewards.workers.worker", str(theirs.fileno()), str(life)]
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
        self._output = OutputTail().follow(self._process.stdout)
        self._loaded: dict[str, Scope] = {}
        self.has_judged = False
        self._kill_lock = threading.Lock()
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        """True if it waits for a request: an idle worker that wrote or closed anything is broken.

        A process that was just killed still looks alive until its last thread has ended; see `_DiedIdle`.
        """
        self._connection.settimeout(0)
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._process.poll() is None
        except OSError:
            return False
        return False

    def load(self, spec: str, settings: Mapping[str, Any], timeout_s: float, cancelled: threading.Event) -> Scope:
        """Have it look a function up, once, and return what the function sees in one call.

        Raises as `ask`, and `ConfigError` with the worker's reason.
        """
        key = json.dumps([spec, settings], default=str)
        if key not in self._loaded:
            try:
                request = {"do": "load", "spec": spec, "settings": settings}
                if spec.startswith(COPY):
                    from lockstep.rewards.workers.copies import pickled  # other runs do not load it

                    request |= pickled(spec)
                reply = self.ask(request, timeout_s, cancelled)
            except _TimedOut:
                raise _TimedOut(f"loading {spec} took longer than {timeout_s:g} s") from None
            if "error" in reply:
                raise ConfigError(str(reply["error"]))
            self._loaded[key] = _scope(reply)
        return self._loaded[key]

    def ask(self, request: Mapping[str, Any], timeout_s: float, cancelled: threading.Event) -> dict[str, Any]:
        """Send a request and return the reply. Raises `_TimedOut` also if the call was cancelled, `_DiedIdle` or
        `_Died`."""
        deadline = time.monotonic() + timeout_s
        call = secrets.token_hex(8)  # not in what an earlier function writes late
        unsent = memoryview(json.dumps({**request, "call": call}, default=_plain).encode() + b"\n")
        raw_reply = bytearray()
        while raw_reply.find(b"\n", len(RECEIVED)) < 0:
            left = deadline - time.monotonic()
            if left <= 0 or cancelled.is_set():
                raise _TimedOut(f"no answer in {timeout_s:g} s{self._output_end()}")
            if len(raw_reply) > MAX_REPLY_BYTES:
                raise _Died(f"its process sent more than {MAX_REPLY_BYTES} bytes; verdicts have some hundred")
            self._connection.settimeout(min(left, CANCEL_POLL_S))
            try:
                if unsent:
                    unsent = unsent[self._connection.send(unsent) :]
                    continue
                chunk = self._connection.recv(2**20)
            except TimeoutError:
                continue
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise (_Died if raw_reply else _DiedIdle)(self._obituary())
            raw_reply += chunk
        return _parse(raw_reply, call)

    def kill(self) -> None:
        """End it and everything in its process group, and wait for its end. Idempotent."""
        with self._kill_lock:
            if self._is_killed:
                return
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                # Before it is waited for: until then no other group can have its number.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._life)

    def _output_end(self, *, wait_s: float = 0.0) -> str:
        text = self._output.text(wait_s=wait_s)
        return f"; its output ends: {text[-300:]}" if text else ""

    def _obituary(self) -> str:
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"its process closed the connection{self._output_end()}"
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"
        return f"its process {how}{self._output_end(wait_s=1.0)}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _kill_all(workers: Mapping[int, _Worker]) -> None:
    for worker in list(workers.values()):
        worker.kill()


def _parse(line: bytes | bytearray, call: str) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict) or reply.get("call") != call:
        raise _Died("its process sent something that is not a reply")
    return reply


def _scope(reply: Mapping[str, Any]) -> Scope:
    """Return the scope in a reply. Raises `_Died` for anything else."""
    try:
        return Scope(reply.get("scope"))
    except ValueError as error:
        raise _Died(f"its process sent something that is not a scope ({error})") from None


def _verdicts(reply: Mapping[str, Any], num_turns: Sequence[int]) -> list[Verdict]:
    """Return one verdict per rollout. Raises `_Died` for anything else: the process may have written anything.

    num_turns: of each rollout.
    """
    count = len(num_turns)
    try:
        verdicts = [_verdict(entry, turns) for entry, turns in zip(reply["verdicts"], num_turns, strict=False)]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _Died(f"its process sent something that is not a verdict ({type(error).__name__}: {error})") from None
    if len(reply["verdicts"]) != count:
        raise _Died(f"its process sent {len(reply['verdicts'])} verdicts for {count} rollouts")
    return verdicts


def _verdict(entry: Mapping[str, Any], num_turns: int) -> Verdict:
    outcome, value = Outcome(entry["outcome"]), float(entry["value"])
    turns = tuple(map(float, entry["turns"]))
    if turns and (len(turns) != num_turns or sum(turns) != value):
        raise ValueError(f"{len(turns)} rewards for {num_turns} turns, with the sum {sum(turns)} for {value}")
    if (outcome is Outcome.VALUE) != math.isfinite(value):
        raise ValueError(f"a verdict {outcome} with value {value}")
    columns = {str(column): logged_value(item) for column, item in entry.get("logged", {}).items()}
    return Verdict(outcome=outcome, value=value, turns=turns, logged=columns, detail=str(entry["detail"])[:500])


def _measures(reply: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, int]]:
    """Return sums and counts of what a function measured. Raises `_Died` for anything else."""
    try:
        sums, counts = (
            {str(name): float(value) for name, value in part.items()} for part in reply.get("measures", ({}, {}))
        )
        return sums, {name: max(1, int(count)) for name, count in counts.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _Died(f"its process sent something that is not a measure ({type(error).__name__}: {error})") from None


def _plain(value: Any) -> Any:
    """Convert arrays and scalars of data sets to JSON's types; anything else to text."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
