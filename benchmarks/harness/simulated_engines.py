"""Engines without a model: how long they take is computed on a virtual clock, and what they answer is drawn.

    Lengths            log-normal numbers of tokens or turns, cut at a limit, alike within groups
    EngineQueue        continuous batching: a step takes `base_s + per_request_s * running` and samples a token for each
    SimulatedEngine    member of the product's pool; answers itself, or over HTTP from `scripted_server`
    SimulatedTask      environment that answers a drawn number of turns

Draws depend on seeds and ids alone, so any number of drivers gets the same answers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import math
import random
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from aiohttp import web

from harness.virtual_clock import VirtualBackgroundLoop
from lockstep.lab.environments.scripted_engine import CannotScore
from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.engine.engine_answers import FIRST_LABEL, Answer, check_prompt, engine_call, sample_params
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import EngineLostError
from lockstep.rollout.records import EngineCall, ImageSpan, Message
from lockstep.rollout.server.generate_route import ROUTE, encode_answer
from lockstep.rollout.server.server_engine import ServerEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal numbers, at least 1."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    longest: int
    alike: float = 0.5
    """Share of the variance that the members of a group have in common."""

    def of(self, group: float, own: float) -> int:
        """Return the number of a member. group, own: standard normal draws of the group and of the member."""
        normal = math.sqrt(self.alike) * group + math.sqrt(1 - self.alike) * own
        return min(self.longest, max(1, round(self.median * math.exp(self.sigma * normal))))


def normal(*key: int) -> float:
    """Return a standard normal number, always the same for a key."""
    return random.Random(zlib.crc32(repr(key).encode())).gauss(0.0, 1.0)


class CpuMeter:
    """CPU time of the simulation itself, which does not count as a driver's."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds += time.thread_time() - start


class EngineQueue:
    """Requests of one engine, in the time of its loop. At most `max_running` are sampled at once; others wait."""

    def __init__(self, *, base_s: float, per_request_s: float, max_running: int, meter: CpuMeter | None = None) -> None:
        self._base_s, self._per_request_s, self._max_running = base_s, per_request_s, max_running
        self._meter = meter or CpuMeter()
        self._steps = 0.0
        """Steps made while requests ran: what a request that ran all the time got in tokens."""
        self._at = 0.0
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        """Heap of (step after which it ends, number, its end)."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def step_s(self) -> float:
        return self._base_s + self._per_request_s * len(self._running)

    async def serve(self, tokens: int) -> None:
        """Return when this many tokens are sampled."""
        with self._meter.counted():
            end = asyncio.get_running_loop().create_future()
            self._advance()
            self._waiting.append((tokens, end))
            self._schedule()
        await end

    def fail(self, error: Exception) -> None:
        """Raise an error in all requests, and forget them."""
        ends = [end for _, _, end in self._running] + [end for _, end in self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._schedule()
        for end in ends:
            if not end.done():
                end.set_exception(error)

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running:
            self._steps += (now - self._at) / self.step_s
        self._at = now

    def _schedule(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            tokens, end = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + tokens, next(self._numbers), end))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left_s = max(0.0, self._running[0][0] - self._steps) * self.step_s
            self._timer = asyncio.get_running_loop().call_at(self._at + left_s, self._end_first)

    def _end_first(self) -> None:
        with self._meter.counted():
            self._advance()
            self._steps = max(self._steps, self._running[0][0])  # but for rounding, it is there
            while self._running and self._running[0][0] <= self._steps:
                _, _, end = heapq.heappop(self._running)
                if not end.done():
                    end.set_result(None)
            self._schedule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The answers of all engines of a run."""

    words: Sequence[int]
    """Token ids of plain text, from which answers are drawn."""
    vocab_size: int
    max_model_len: int
    lengths: Lengths

    def length(self, sampling: Sampling) -> int:
        """Return the tokens of an answer; `Sampling.affinity` names the group."""
        assert sampling.affinity is not None
        assert sampling.seed is not None
        return min(self.lengths.of(normal(*sampling.affinity), normal(sampling.seed)), sampling.max_tokens)

    def answer(self, length: int, *, seed: int, stop: int | None) -> Answer:
        """Return an answer of this many tokens. stop: its last token; None: a limit cut it."""
        rng = np.random.default_rng(seed)
        ids = np.asarray(self.words)[rng.integers(0, len(self.words), length)].tolist()
        if stop is not None:
            ids[-1] = stop
        return Answer(
            sampled_ids=ids,
            candidate_ids=ids,
            candidate_logprobs=(-rng.random(length, dtype=np.float32)).tolist(),
            starts=list(range(length)),
            finish_reason="length" if stop is None else "stop",
            versions=[(FIRST_LABEL, 0, length)],
        )


class SimulatedEngine(CannotScore):
    """An engine of a pool. Without a server it validates its drawn answer as an engine of this process does."""

    dtype = torch.float32

    def __init__(
        self,
        number: int,
        queue: EngineQueue,
        *,
        script: Script,
        loop: VirtualBackgroundLoop,
        meter: CpuMeter,
        server: ServerEngine | None,
        http_every: int,
    ) -> None:
        """server: asked for one of `http_every` requests; None or 0: for none."""
        self.name = f"simulated engine {number}"
        self.loop = loop
        self.queue = queue
        self.vocab_size = script.vocab_size
        self.max_model_len = script.max_model_len
        self.num_requests = self.num_tokens = 0
        self._script, self._meter = script, meter
        self._server, self._http_every = server, http_every
        self._is_lost = False

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        if self._is_lost:
            raise EngineLostError(f"{self.name} is gone")
        with self._meter.counted():
            length = self._script.length(sampling)
            is_cut = length == min(self._script.lengths.longest, sampling.max_tokens)
            is_remote = bool(self._http_every) and self.num_requests % self._http_every == 0
            self.num_requests += 1
            self.num_tokens += length
        await self.queue.serve(length)
        if is_remote and self._server is not None:
            with self.loop.clock.held():
                request = replace(sampling, max_tokens=length, ignore_eos=is_cut)
                return await self._server.generate(prompt_ids, request)
        room = check_prompt(prompt_ids, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        params = sample_params(sampling, room=room)
        with self._meter.counted():
            stop = None if is_cut else sampling.stop_token_ids[0]
            answer = self._script.answer(length, seed=sampling.seed or 0, stop=stop)
        return engine_call(
            prompt_ids,
            answer,
            with_support=False,
            max_tokens=params["max_tokens"],
            vocab_size=self.vocab_size,
            source=self.name,
        )

    def lose(self) -> None:
        """Die: requests in flight and later ones raise `EngineLostError`."""
        self._is_lost = True
        self.queue.fail(EngineLostError(f"{self.name} is gone"))


class SimulatedTask:
    """Answers the model with the row's `answer` until the drawn number of turns is over."""

    declaration = Declaration(reads="prompt", max_turns=1000)
    tools: Tools = ()

    def __init__(self, turns: Lengths) -> None:
        self._lengths = turns
        self._left: int | None = None
        self._example: Mapping[str, Any] = {}

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        self._example = example
        return [{"role": "user", "content": example["prompt"]}]

    async def step(self, message: Message) -> Step:
        if self._left is None:  # the first turn differs between the members of a group
            own = normal(zlib.crc32(str(message["content"]).encode()))
            self._left = self._lengths.of(normal(self._example["place"]), own)
        self._left -= 1
        if self._left <= 0:
            return Step(done=True)
        return Step(messages=({"role": "user", "content": self._example["answer"]},))


def scripted_server(script: Script) -> web.Application:
    """Return a server that answers over Lockstep's generate route with as many tokens as are asked for."""
    description = {
        "vllm_config": {
            "model_config": {
                "max_model_len": script.max_model_len,
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": {"world_size": 1, "data_parallel_size": 1},
            "scheduler_config": {"enable_chunked_prefill": False},
            "weight_transfer_config": {"backend": "gloo"},
            "instance_id": "1",
            "device_config": {"device": "cpu", "device_type": "cpu"},
        }
    }

    async def generate(request: web.Request) -> web.Response:
        params = json.loads(await request.read())["sampling_params"]
        stop = None if params["ignore_eos"] else params["stop_token_ids"][0]
        answer = script.answer(params["max_tokens"], seed=params["seed"], stop=stop)
        return web.json_response(encode_answer(answer))

    async def describe(request: web.Request) -> web.Response:
        return web.json_response(description)

    async def confirm(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=2**30)
    app.router.add_get("/server_info", describe)
    app.router.add_get("/health", confirm)
    app.router.add_get(ROUTE, confirm)
    app.router.add_post(ROUTE, generate)
    return app
