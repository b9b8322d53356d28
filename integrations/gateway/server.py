"""HTTP server of the gateway: routes, keys, sessions, errors.

    POST /v1/chat/completions     POST /v1/responses     POST /v1/messages     POST /v1/completions
    GET /v1/models     GET /v1/models/{model}     POST /tokenize     POST /v1/messages/count_tokens     GET /health

The routes of the first line are the dialects (`integrations/gateway/dialects`): each has its own JSON, and all go
through the same limits, sessions and record. All but `/health` also exist under `/s/<session>`, which records in a
named session: `GET /s/<session>/rollout` reads the record, `DELETE /s/<session>` deletes it. The gateway's key opens
every route, a session's key only its own session, under `/v1` and the session's own address.

Covered: loopback by default, a random key, keys compared in constant time, limits for the size, time and number of
requests, errors without internal details. Not covered: TLS, rate limits, and clients that have the key and overload the
engine. Put a reverse proxy in front before others can reach the port.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import logging
import re
import resource
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self
from weakref import WeakKeyDictionary

from aiohttp import web

from lockstep.integrations.gateway.completion import Completion, complete
from lockstep.integrations.gateway.dialects import DIALECTS
from lockstep.integrations.gateway.dialects.anthropic_messages import MESSAGES
from lockstep.integrations.gateway.dialects.dialect import Dialect, Reply
from lockstep.integrations.gateway.errors import ApiError, not_supported, quoted, unknown_field
from lockstep.integrations.gateway.messages import read_last_ids, read_tools
from lockstep.integrations.gateway.prompt_maker import PromptMaker
from lockstep.integrations.gateway.request import Offer, SampleRequest, read_json
from lockstep.integrations.gateway.retries import Retries
from lockstep.integrations.gateway.session import Session, TurnMark
from lockstep.integrations.gateway.transfer import IS_LAST, errors_as_json, read_body, send
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from lockstep.rollout.rollout_lines import to_json
from lockstep.rollout.system.captured_output import SILENT

log = logging.getLogger(__name__)

MAX_NAMED_SESSIONS = 1024
MAX_CALLS_WITHOUT_SESSION = 2**15
MAX_TOKENS_WITHOUT_SESSION = 2**23
"""Answers that plain `/v1` requests with the gateway's key can continue, and their ids, prompts included: at most some
300 MB. They are never trained."""
SHUTDOWN_S = 1.0
IDLE_S = 75.0
"""Time for the header of a request, and for the next request on a connection."""
BRACKETS, BRACKETS_PER_TOKEN = 100_000, 4
"""Opening brackets in the body of a request, those in its text included, and further ones per token of the context."""
_SESSION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_TOKENIZE_FIELDS = {"model", "messages", "tools", "prompt", "add_special_tokens", "add_generation_prompt"}


class Gateway:
    """OpenAI-compatible server for one engine and one chat: `async with Gateway(...)` in the engine's event loop."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        offered: Sequence[Sampling],
        settings: GatewaySettings | None = None,
    ) -> None:
        """offered: sampling settings that requests may ask for, the default first: those of training, and those of
        evaluation. Sessions from `open_session` have their own."""
        self._engine = engine
        self._chat = chat
        self._offered = tuple(offered)
        self._settings = settings or GatewaySettings()
        self.api_key = self._settings.api_key or secrets.token_urlsafe(32)
        self._anonymous = Session(
            "", offered=offered, max_calls=MAX_CALLS_WITHOUT_SESSION, max_tokens=MAX_TOKENS_WITHOUT_SESSION
        )
        self._named: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        self._retries: WeakKeyDictionary[Session, Retries] = WeakKeyDictionary()
        self._prompts = PromptMaker(chat, max_model_len=engine.max_model_len, max_images=self._settings.max_images)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._max_connections = _open_files() // 2  # the rest is for the engine, checkpoints and agents
        self._has_refused = False
        self._address = ""

    @property
    def base_url(self) -> str:
        """The `base_url` for OpenAI clients, known after `start`."""
        return f"{self._address}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen. Raises `ConfigError` if the address is taken, or is not an address of this machine."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=int(self._settings.max_request_mib * 2**20))
        for prefix in ("", "/s/{session}"):
            for dialect in DIALECTS:
                app.router.add_post(f"{prefix}/v1{dialect.path}", functools.partial(self._sample, dialect))
            # Anthropic's clients add /v1 to the URL that they are given; here it has one already.
            for path in ("/v1", "/v1/v1"):
                app.router.add_post(f"{prefix}{path}{MESSAGES.path}/count_tokens", self._count_tokens)
            app.router.add_post(f"{prefix}/v1/v1{MESSAGES.path}", functools.partial(self._sample, MESSAGES))
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model}}", self._model)
            app.router.add_post(f"{prefix}/tokenize", self._tokenize)
            app.router.add_post(f"{prefix}/v1/tokenize", self._tokenize)
        app.router.add_get("/s/{session}/rollout", self._read_session)
        app.router.add_delete("/s/{session}", self._delete_session)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=SILENT,
            shutdown_timeout=SHUTDOWN_S,
            handler_cancellation=True,  # when its client disconnects: no one reads what would be sampled
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            lingering_time=SHUTDOWN_S,
        )
        await runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: self._connection(runner), self._settings.host, self._settings.port
            )
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"the gateway cannot listen on {self._settings.host} port {self._settings.port}: {error.strerror}; "
                "set gateway.port=0 for any free port"
            ) from error
        self._runner = runner
        host, port = self._listener.sockets[0].getsockname()[:2]
        host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _connection(self, runner: web.AppRunner) -> asyncio.Protocol:
        """Return the protocol of a new connection, or one that closes it if too many are open."""
        assert runner.server is not None
        if len(runner.server.connections) < self._max_connections:
            return runner.server()
        if not self._has_refused:
            self._has_refused = True
            log.warning("gateway: %d connections are open; further ones are closed at once", self._max_connections)
        return _Refused()

    async def close(self) -> None:
        """Stop listening; requests in flight have `SHUTDOWN_S` to finish. May be called twice."""
        runner, self._runner = self._runner, None
        if self._listener is not None:
            self._listener.close()
        if runner is not None:
            await runner.cleanup()
            self._prompts.close()

    def url_of(self, session: Session) -> str:
        """Return the `base_url` of one session: clients that an agent caches by their URL serve one session only."""
        return f"{self._address}/s/{session.place}/v1"

    def open_session(self, *, sampling: Sampling, seed: int, max_requests: int) -> Session:
        """Open a session with its own key, for one episode. End it with `close_session`."""
        session = Session(
            "", offered=(sampling,), seed=seed, max_requests=max_requests, max_calls=2**31, any_model=True
        )
        self._by_key[_digest(session.key)] = session
        return session

    def close_session(self, session: Session) -> None:
        """Revoke the key of a session. Answers still being sampled are not recorded."""
        del self._by_key[_digest(session.key)]
        session.close()

    # Authentication

    def _authenticate(self, request: web.Request) -> Session | None:
        """Return the session of a key, or None for the gateway's key. Raises `ApiError` (401)."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")  # Anthropic's
        if key:
            digest = _digest(key)
            if hmac.compare_digest(digest, _digest(self.api_key)):
                return None
            # Looked up by digest, so that the time does not depend on any key.
            session = self._by_key.get(digest)
            if session is not None:
                return session
        raise ApiError(
            f"{'an incorrect' if key else 'no'} API key was sent; expected the header `Authorization: Bearer <key>`, "
            "or `x-api-key: <key>`, with the key of this gateway or of one of its sessions",
            status=401,
            code="invalid_api_key",
        )

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request, by its key and its path. Raises `ApiError`."""
        session, name = self._authenticate(request), request.match_info.get("session")
        if session is None:
            return self._anonymous if name is None else self._named_session(name)
        # A client may outlive the event loop of its episode in some cache, but none of its connections does.
        request[IS_LAST] = True
        if name not in (None, session.place):
            raise ApiError("this key opens one session, which is under /v1, not under /s/<session>", status=403)
        return session

    def _named_session(self, name: str) -> Session:
        """Return the session with this name, or a new one that is not yet in the table."""
        if not _SESSION_NAME.fullmatch(name):
            raise ApiError(
                f"session name {quoted(name)}: expected 1 to 128 letters, digits, dots, dashes or underscores",
                status=404,
            )
        if name in self._named:
            return self._named[name]
        affinity = (zlib.crc32(name.encode()),)  # turns of a session extend each other
        return Session(name, offered=[replace(one, affinity=affinity) for one in self._offered])

    def _keep(self, session: Session) -> Session:
        """Return the session with this name, after adding a new one to the table. Raises `ApiError` if it is full."""
        if not session.name or session.name in self._named:
            return self._named.get(session.name, session)
        if len(self._named) >= MAX_NAMED_SESSIONS:
            raise ApiError(
                f"{len(self._named)} sessions are open; DELETE /s/<session> those that were read",
                status=429,
                kind="requests",
                code="too_many_sessions",
            )
        self._named[session.name] = session
        return session

    def _drop_if_unused(self, session: Session) -> None:
        if session.is_unused and self._named.get(session.name) is session:
            del self._named[session.name]

    def _retries_of(self, session: Session) -> Retries:
        return self._retries.setdefault(session, Retries())

    # Routes

    async def _sample(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        raw = await self._body(request)
        body = await self._json(session, raw)
        completion = self._retries_of(session).find(request.headers, dialect.path, raw)
        if completion is None:
            parsed_request = self._parsed(dialect, session, body)
            session = self._keep(session)
            attempt = self._retries_of(session).begin(request.headers, dialect.path, raw, request.transport)
            try:
                completion = await complete(self._engine, self._chat, self._prompts, session, parsed_request)
            except BaseException:
                self._retries_of(session).end(attempt, None)
                self._drop_if_unused(session)
                raise
            self._retries_of(session).end(attempt, completion)
        try:
            return await self._deliver(dialect, request, completion)
        except BaseException:
            # The client cannot continue an answer that it has not seen; it sends the request again.
            self._retries_of(session).forget(completion)
            session.remove(completion.choices, completion.prompt.kind)
            self._drop_if_unused(session)
            raise

    async def _body(self, request: web.Request) -> bytes:
        """Return the body of a request. Raises `ApiError` if it is late, or takes too long to parse."""
        raw = await read_body(request)
        # Lists and objects cost some 100 bytes and a microsecond each; text and numbers are cheap.
        brackets, limit = raw.count(b"[") + raw.count(b"{"), BRACKETS + BRACKETS_PER_TOKEN * self._engine.max_model_len
        if brackets > limit:
            raise ApiError(f"the body of the request has {brackets} opening brackets, at most {limit} are allowed")
        return raw

    async def _json(self, session: Session, raw: bytes) -> dict[str, Any]:
        """Parse a body, with digests in place of images. Raises `ApiError`."""
        body = read_json(raw)
        await self._prompts.store_images(session, body)
        return body

    def _parsed(self, dialect: Dialect, session: Session, body: Mapping[str, Any]) -> SampleRequest:
        model, samplings = body.get("model"), session.offered
        self._check_model(session, model)
        if model in self._settings.adapters and not session.any_model:
            samplings = tuple(replace(one, model=model) for one in samplings)
        offer = Offer(
            session=session,
            sampling=samplings,
            vocab_size=len(self._chat.tokenizer),
            max_model_len=self._engine.max_model_len,
        )
        return dialect.read(body, offer)

    async def _deliver(self, dialect: Dialect, request: web.Request, completion: Completion) -> web.StreamResponse:
        """Write the answer. Raises if the client has disconnected, or does not read it in time."""
        adapter = completion.request.sampling.model
        model = adapter if adapter in self._settings.adapters else self._settings.model_name
        reply = Reply(completion=completion, model=model, decode=self._chat.decode)
        if completion.request.stream:
            # In one piece: a client that closes at the last event has read the whole answer.
            events = b"".join(dialect.events(reply))
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            response = web.Response(body=events, headers=headers)
        else:
            response = web.json_response(dialect.body(reply))
        await send(request, response)
        return response

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Answer with the prompt ids of a chat completion with these messages, or the ids of a text."""
        session = self._session(request)
        body = await self._json(session, await self._body(request))
        self._check_model(session, body.get("model"), may_be_missing=True)
        for field, value in body.items():
            if field not in _TOKENIZE_FIELDS:
                raise unknown_field(field)
            if field == "add_generation_prompt" and value is False:
                raise not_supported(
                    field, why="a prompt always ends with the header of the assistant turn; leave it out"
                )
        if body.get("messages") is not None:
            conversation = session.prefixes.read(body["messages"], read_tools(body.get("tools")))
            mark = TurnMark(sampled_ids=read_last_ids(body["messages"]))
            prompt, _ = await self._prompts.prompt(
                session, SampleRequest(conversation=conversation, mark=mark, sampling=session.offered[0])
            )
            ids = prompt.ids
        elif isinstance(body.get("prompt"), str):
            ids = await self._prompts.text_ids(body["prompt"])
        else:
            raise ApiError("expected messages (a list) or prompt (a string)", param="messages")
        return web.json_response({"count": len(ids), "max_model_len": self._engine.max_model_len, "tokens": list(ids)})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        """Answer with the number of ids of the prompt of a message, as Anthropic's API."""
        session = self._session(request)
        body = await self._json(session, await self._body(request))
        prompt, _ = await self._prompts.prompt(session, self._parsed(MESSAGES, session, {"max_tokens": 1, **body}))
        return web.json_response({"input_tokens": len(prompt.ids)})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [self._model_card(name) for name in self._served]})

    async def _model(self, request: web.Request) -> web.Response:
        session, name = self._session(request), request.match_info["model"]
        self._check_model(session, name)
        return web.json_response(self._model_card(name if name in self._served else self._settings.model_name))

    async def _read_session(self, request: web.Request) -> web.Response:
        """Answer with the record as a rollout, as in `rollouts/*.jsonl`: calls with ids, logprobs and versions."""
        session = self._recorded_session(request)
        rollout = Rollout(
            rollout_id=0,
            group_id=0,
            calls=session.calls,
            messages=session.last_conversation,
            call_messages=session.call_messages,
            outcome=session.facts,
        )
        return web.json_response(to_json(rollout))

    async def _delete_session(self, request: web.Request) -> web.Response:
        session = self._recorded_session(request)
        session.close()
        del self._named[session.name]
        return web.json_response({"id": session.name, "object": "session", "deleted": True})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    def _recorded_session(self, request: web.Request) -> Session:
        """Return the named session of a path. Raises `ApiError` (404) if it does not exist."""
        name = request.match_info["session"]
        if self._authenticate(request) is not None:
            raise ApiError("expected the gateway's own key: the key of a session does not open records", status=403)
        if name not in self._named:
            raise ApiError(f"session {quoted(name)} does not exist", status=404)
        return self._named[name]

    def _check_model(self, session: Session, model: Any, *, may_be_missing: bool = False) -> None:
        if model is None and may_be_missing:
            return
        if not isinstance(model, str):
            raise ApiError("you must provide a model parameter", param="model")
        if model not in self._served and not session.any_model:
            raise ApiError(
                f"the model {quoted(model)} does not exist; this gateway serves {', '.join(map(repr, self._served))}",
                status=404,
                param="model",
                code="model_not_found",
            )

    @property
    def _served(self) -> tuple[str, ...]:
        return (self._settings.model_name, *self._settings.adapters)

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "lockstep",
            "max_model_len": self._engine.max_model_len,
        }


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _open_files() -> int:
    """Return the number of files that this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**16 if limit == resource.RLIM_INFINITY else limit


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
