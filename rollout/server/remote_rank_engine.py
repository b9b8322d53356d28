"""Access of rank 0 to the engines of other ranks (`rollout.engine=colocated`).

    rank 0   episodes ─► pool ─┬─► its own engine
    rank 1                     ├─► RemoteRankEngine ═ HTTP, JSON ═► EngineService ─► its own engine
    ...                        └─► ...

Each rank updates the weights of its own engine. The service listens on one address, loopback if all ranks are on one
machine, and requires a key shared by the ranks.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

import numpy as np
import torch
from aiohttp import web

from lockstep.rollout.engine.engine_answers import integer, number
from lockstep.rollout.engine.protocol import PooledEngine, Sampling
from lockstep.rollout.engine.token_scores import TokenScores
from lockstep.rollout.errors import EngineError, EvidenceError, error_named
from lockstep.rollout.records import EngineCall, ImageSpan
from lockstep.rollout.saved_rollouts import call_from_json, call_to_json
from lockstep.rollout.server.client import ServerClient
from lockstep.rollout.server.generate_route import decode_array, encode_array
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.captured_output import SILENT

SCORE_ARRAYS = ("logprobs", "top_ids", "top_logprobs")
"""Arrays of an answer with `TokenScores`."""
MAX_REQUEST_MIB = 64
"""Size limit of a request; a million prompt ids are 7 MiB of JSON."""


class EngineService:
    """HTTP service in front of this rank's engine."""

    def __init__(self, engine: PooledEngine, *, key: str) -> None:
        self._engine = engine
        self._authorization = f"Bearer {key}"
        app = web.Application(client_max_size=MAX_REQUEST_MIB * 2**20)
        app.add_routes([web.post("/{call}", self._answer)])
        self._runner = web.AppRunner(app, access_log=None, logger=SILENT)
        self.url = ""

    @classmethod
    async def start(cls, engine: PooledEngine, *, host: str, key: str) -> Self:
        """Listen on a free port of this address. Call it in the engine's loop."""
        service = cls(engine, key=key)
        await service._runner.setup()
        await web.TCPSite(service._runner, host, 0).start()
        port: int = service._runner.addresses[0][1]
        service.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return service

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        authorization = request.headers.get("Authorization", "")
        if not hmac.compare_digest(authorization.encode(), self._authorization.encode()):
            return web.json_response({"error": "the key of the run is missing"}, status=401)
        calls = {
            "facts": self._facts,
            "generate": self._generate,
            "score": self._score,
            "score_top": self._score_top,
        }
        call = calls.get(request.match_info["call"])
        if call is None:
            return web.json_response({"error": "no such call"}, status=404)
        try:
            return web.json_response({"result": await call(await request.json())})
        except (EngineError, EvidenceError) as error:  # raised again by the caller
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
        return call_to_json(await self._engine.generate(body["prompt_ids"], sampling, _spans(body)))

    async def _score(self, body: Any) -> tuple[list[float], list[int]]:
        return await self._engine.score_ranked(body["ids"], _spans(body))

    async def _score_top(self, body: Any) -> dict[str, Any]:
        scores = await self._engine.score_top(body["ids"], body["top_k"], _spans(body))
        arrays = {name: encode_array(getattr(scores, name)) for name in SCORE_ARRAYS}
        return {**arrays, "version": scores.version}


def _spans(body: Any) -> list[ImageSpan]:
    """Return the images of a request, whose pixels this rank reads from the folder of the run."""
    return [ImageSpan(**image) for image in body.get("images", ())]


class RemoteRankEngine:
    """The engine of another rank, behind its service. That rank pauses, updates and closes it."""

    def __init__(self, url: str, *, key: str, rank: int, loop: BackgroundLoop, timeout_s: float) -> None:
        """Connect. timeout_s: limit of a request, longer than the other rank's own."""

        async def connect() -> tuple[ServerClient, dict[str, Any]]:
            client = ServerClient(url, api_key=key)
            return client, (await client.post("/facts", {}, timeout_s=timeout_s))["result"]

        self._client, facts = loop.run(connect())
        self._timeout_s = timeout_s
        self.name = f"the engine of rank {rank}"
        self.loop = loop
        self.dtype: torch.dtype = getattr(torch, facts["dtype"])
        self.vocab_size: int = facts["vocab_size"]
        self.max_model_len: int = facts["max_model_len"]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
    ) -> EngineCall:
        body = {"prompt_ids": list(prompt_ids), "sampling": asdict(sampling), "images": list(map(asdict, images))}
        return call_from_json(await self._ask("/generate", body))

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        return (await self.score_ranked(ids, images))[0]

    async def score_ranked(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[list[float], list[int]]:
        answer = await self._ask("/score", {"ids": list(ids), "images": list(map(asdict, images))})
        try:
            scores, ranks = answer
            return [number(score) for score in scores], [integer(rank) for rank in ranks]
        except (TypeError, ValueError) as error:
            raise EvidenceError(f"{self.name}: the logprobs of {len(ids)} ids are not numbers ({error})") from error

    async def score_top(self, ids: Sequence[int], top_k: int, images: Sequence[ImageSpan] = ()) -> TokenScores:
        body = {"ids": list(ids), "top_k": top_k, "images": list(map(asdict, images))}
        answer = await self._ask("/score_top", body)
        try:
            arrays = {name: np.asarray(decode_array(answer[name])) for name in SCORE_ARRAYS}
            return TokenScores(ids=np.asarray(ids, dtype=np.int64), version=integer(answer["version"]), **arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise EvidenceError(f"{self.name}: the answer has no scores of {len(ids)} ids ({error})") from error

    async def close(self) -> None:
        """Close the connection; the other rank closes its engine."""
        await self._client.close()

    async def _ask(self, path: str, body: object) -> Any:
        """Raise what the remote engine raised; `EngineError` if the rank is gone."""
        try:
            answer = await self._client.post(path, body, timeout_s=self._timeout_s)
        except EngineError as error:
            raise EngineError(f"{self.name} does not answer: {error}") from error
        if "failed" in answer:
            text = f"{self.name}: {answer['text']}"
            raise error_named(answer["failed"], text) or EngineError(text)
        return answer["result"]
