"""Engines of other ranks, as the rank that runs the episodes sees them (`rollout.engine=colocated`).

    rank 0   episodes ─► pool ─┬─► its own engine
    rank 1                     ├─► PeerEngine ═ HTTP, JSON ═► EngineService ─► its own engine
    ...                        └─► ...

Every rank gives the weights to its own engine; what passes here is token ids, logprobs and errors. The service listens
on one address, loopback if all ranks are on this machine, and answers nobody without the key that the ranks share.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from aiohttp import web

from rollout.engine.protocol import PooledEngine, Sampling
from rollout.errors import EngineError, EvidenceError, error_named
from rollout.records import EngineCall
from rollout.saved_rollouts import call_from_json, call_to_json
from rollout.server.client import ServerClient
from rollout.system.background_loop import BackgroundLoop

MAX_REQUEST_MIB = 64
"""Of a prompt's ids as JSON; a million of them are 7 MiB."""


class EngineService:
    """Answers another rank with this rank's engine."""

    def __init__(self, engine: PooledEngine, key: str, runner: web.AppRunner, url: str) -> None:
        self._engine = engine
        self._authorization = f"Bearer {key}"
        self._runner = runner
        self.url = url

    @classmethod
    async def start(cls, engine: PooledEngine, *, host: str, key: str) -> EngineService:
        """Listen on a free port of this address. Call it in the engine's loop."""
        app = web.Application(client_max_size=MAX_REQUEST_MIB * 2**20)
        runner = web.AppRunner(app, access_log=None)
        service = cls(engine, key, runner, "")
        app.add_routes([web.post("/{act}", service._answer)])
        await runner.setup()
        site = web.TCPSite(runner, host, 0)
        await site.start()
        port: int = runner.addresses[0][1]
        service.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return service

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        found = request.headers.get("Authorization", "")
        if not hmac.compare_digest(found.encode(), self._authorization.encode()):
            return web.json_response({"error": "the key of the run is missing"}, status=401)
        act = {"facts": self._facts, "generate": self._generate, "score": self._score}.get(request.match_info["act"])
        if act is None:
            return web.json_response({"error": "no such call"}, status=404)
        try:
            return web.json_response({"result": await act(await request.json())})
        except (EngineError, EvidenceError) as error:  # the caller decides what they mean for its episode
            return web.json_response({"failed": type(error).__name__, "text": str(error)})

    async def _facts(self, _: Any) -> dict[str, Any]:
        engine = self._engine
        return {
            "dtype": str(engine.dtype).removeprefix("torch."),
            "vocab_size": engine.vocab_size,
            "max_model_len": engine.max_model_len,
        }

    async def _generate(self, body: Any) -> dict[str, Any]:
        settings: dict[str, Any] = body["sampling"]
        for name in ("stop_token_ids", "affinity"):  # JSON has no tuples
            settings[name] = tuple(settings[name]) if settings.get(name) is not None else None
        sampling = Sampling(**settings)
        return call_to_json(await self._engine.generate(body["prompt_ids"], sampling))

    async def _score(self, body: Any) -> list[float]:
        return await self._engine.score(body["ids"])


class PeerEngine:
    """The engine of another rank, behind its service. That rank pauses it, gives it weights and closes it."""

    def __init__(self, client: ServerClient, facts: dict[str, Any], *, rank: int, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self.name = f"the engine of rank {rank}"
        self.dtype: torch.dtype = getattr(torch, facts["dtype"])
        self.vocab_size: int = facts["vocab_size"]
        self.max_model_len: int = facts["max_model_len"]
        self.loop: BackgroundLoop

    @classmethod
    def connect(cls, url: str, *, key: str, rank: int, loop: BackgroundLoop, timeout_s: float) -> PeerEngine:
        """timeout_s: of a request, more than what the other rank allows itself."""

        async def make() -> PeerEngine:
            client = ServerClient(url, api_key=key)
            facts = await client.post("/facts", {}, timeout_s=timeout_s)
            return cls(client, facts["result"], rank=rank, timeout_s=timeout_s)

        engine = loop.run(make())
        engine.loop = loop
        return engine

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> EngineCall:
        body = {"prompt_ids": list(prompt_ids), "sampling": asdict(sampling)}
        return call_from_json(await self._ask("/generate", body))

    async def score(self, ids: Sequence[int]) -> list[float]:
        return await self._ask("/score", {"ids": list(ids)})

    async def pause(self, mode: str) -> None:
        """Its own rank does."""

    async def resume(self) -> None:
        """Its own rank does."""

    async def close(self) -> None:
        """The connection; its own rank closes the engine."""
        await self._client.close()

    async def _ask(self, path: str, body: object) -> Any:
        """Raises what the engine raised there; `EngineError` if the rank is gone."""
        try:
            answer = await self._client.post(path, body, timeout_s=self._timeout_s)
        except EngineError as error:
            raise EngineError(f"{self.name} does not answer: {error}") from error
        if "failed" in answer:
            text = f"{self.name}: {answer['text']}"
            raise error_named(answer["failed"], text) or EngineError(text)
        return answer["result"]
