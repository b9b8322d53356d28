r"""A lean generate route for vLLM's server: the same request to the same engine, answered in few bytes.

    vllm serve MODEL --middleware rollout.server.generate_route.CompactGenerate \
                     --middleware rollout.server.guard.RequireKey ...

vLLM's `/inference/v1/generate` makes four objects and 139 bytes of every token, which on one core costs as much as a
small model's sampling. This middleware answers one route of its own and passes everything else on. A client that does
not find the route uses vLLM's (`rollout/server/server_engine.py`).

Name it before the guard: of several, the last is asked first.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import numpy as np

from rollout.engine.engine_answers import answer_of
from rollout.server.compact import ROUTE, encode
from rollout.server.guard import App, Message, Receive, Send


class CompactGenerate:
    """ASGI middleware. GET says that the route is there; POST takes `token_ids` and `sampling_params`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._numbers = itertools.count()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
        elif scope["method"] == "POST":
            await self._generate(scope["app"].state.engine_client, receive, send)
        else:
            await _reply(send, 200, {})

    async def _generate(self, engine: Any, receive: Receive, send: Send) -> None:
        from vllm.exceptions import VLLMClientError

        try:
            prompt, params = _read(await _body(receive))
        except Exception as error:  # whatever it is: the client's, not the engine's, and not to be sent again
            await _reply(send, 400, {"error": f"{type(error).__name__}: {error}"})
            return
        sampling = asyncio.ensure_future(self._sample(engine, prompt, params))
        gone = asyncio.ensure_future(_disconnect(receive))
        await asyncio.wait({sampling, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not sampling.done():
            sampling.cancel()  # vLLM then aborts the request
            return
        try:
            answer = sampling.result()
        except (VLLMClientError, ValueError, TypeError, KeyError) as error:
            await _reply(send, 400, {"error": f"{type(error).__name__}: {error}"})
        except Exception as error:  # whatever the engine raises is the server's failure, and the client's to retry
            await _reply(send, 500, {"error": f"{type(error).__name__}: {error}"})
        else:
            await _reply(send, 200, answer)

    async def _sample(self, engine: Any, prompt: dict[str, Any], params: Any) -> dict[str, Any]:
        outputs = [output async for output in engine.generate(prompt, params, f"lockstep-{next(self._numbers)}")]
        (completion,) = outputs[-1].outputs
        return encode(answer_of(completion))


def _read(raw: bytes) -> tuple[dict[str, Any], Any]:
    """Prompt and `SamplingParams` of a request. Raises whatever is wrong with it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request = json.loads(raw)
    ids = np.asarray(request["token_ids"])
    # Checked here, so that what the engine raises is the engine's failure; ids beyond the vocabulary vLLM refuses.
    if ids.ndim != 1 or ids.dtype.kind != "i" or not ids.size or ids.min() < 0:
        raise ValueError("token_ids must be a list of at least one id, none of them negative")
    params = SamplingParams(**request["sampling_params"], output_kind=RequestOutputKind.FINAL_ONLY)
    if params.n != 1:
        raise ValueError(f"n={params.n}; this route answers with one completion")
    return {"prompt_token_ids": ids.tolist()}, params


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(send: Send, status: int, body: dict[str, Any]) -> None:
    raw = json.dumps(body, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
