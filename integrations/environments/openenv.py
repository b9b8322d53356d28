"""Environment `openenv`: an environment server of OpenEnv (github.com/meta-pytorch/OpenEnv), asked over its WebSocket.

    {"type": "reset", "data": {"seed": 3}}, {"type": "step", "data": <action>}, {"type": "close"} to <url>/ws, answered
    by {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": false}}

The protocol is that of openenv-core 0.3 (`openenv/core/env_client.py`), which need not be installed here. One
connection is one episode: the server makes an environment for it, and lets go of it when the connection ends.

An assistant turn becomes an action: its text in one field of it (`action_field`), or a JSON object
(`action_field=null`). With `tools=true` the tools of an MCP environment are the model's, and each call is a step.
Rewards of all steps are added up in outcome `environment_reward`. An episode that the server did not end has one of 0,
if no step had any.

Not covered: images and other observations that are not text or JSON; starting the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.errors import ConfigError, EnvironmentFault, ToolServerError
from lockstep.rollout.hosts.foreign_schemas import read_tools
from lockstep.rollout.records import Message
from lockstep.rollout.replies import read_json, read_number
from lockstep.rollout.system.deadline import uncounted

MAX_MESSAGE_BYTES = 4 * 2**20
RETRY_S = 0.2
"""Pause before another attempt at a server whose sessions are all taken."""
_known_fields: set[tuple[str, str]] = set()
"""Addresses with a field that an observation had: one without it is then a fault of the server, not of the settings."""
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()


class _Refused(Exception):
    """An action that the server refuses, for a reason that the model can read."""


class OpenEnvironment:
    """One session of a server, from `reset` to `close`."""

    declaration = Declaration(reads="seed", max_turns=16, opens="an environment server", is_deterministic=False)

    def __init__(
        self,
        *,
        url: str | None = None,
        action_field: str | None = "message",
        observation_field: str | None = None,
        tools: bool = False,
        reset_columns: Sequence[str] = ("seed",),
        max_concurrent: int = 1,
        timeout_s: float = 60.0,
        prompt_column: str | None = None,
        system_prompt: str | None = None,
    ):
        """url: address of the server, `http://127.0.0.1:8000`.

        action_field: field of the action that takes the text of a turn; None: the text is the action as JSON.
        observation_field: field of the observation that the model reads; None: all of it, as JSON.
        tools: offer the environment's MCP tools to the model. reset_columns: columns of the row that `reset` is given.
        max_concurrent: sessions that the server allows at once (`max_concurrent_envs` of its app); others wait.
        timeout_s: limit of one answer of the server.
        Raises `ConfigError`: no url, or one of another scheme, or a limit out of range.
        """
        if url is None or not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(
                f"environment openenv: url={url} is not an address; set environment.settings.url=http://127.0.0.1:8000"
            )
        if not timeout_s > 0 or max_concurrent < 1:
            raise ConfigError(
                f"environment openenv: found timeout_s={timeout_s}, max_concurrent={max_concurrent}; set each above 0"
            )
        self._url = f"{url.rstrip('/')}/ws"  # aiohttp takes http for ws
        self._action_field, self._observation_field = action_field, observation_field
        self._has_tools, self._reset_columns = tools, tuple(reset_columns)
        self._max_concurrent, self._timeout_s = max_concurrent, timeout_s
        self._prompt = PromptReader(column=prompt_column, system=system_prompt)
        self._system_prompt = system_prompt
        self._slot: asyncio.Semaphore | None = None
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_over = False
        """True if the server has ended the episode."""
        self.tools: Tools = ()

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return self._prompt.opening(example)

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        """Open a session. The first user turn is the row's prompt, if it has one, and the first observation."""
        slots = _slots.setdefault(asyncio.get_running_loop(), {})
        slot = slots.setdefault((self._url, self._max_concurrent), asyncio.Semaphore(self._max_concurrent))
        with uncounted():
            await slot.acquire()
        self._slot = slot
        arguments = {name: example[name] for name in self._reset_columns if example.get(name) is not None}
        result = await self._open(arguments)
        text = "" if self._has_tools else self._text(result)
        if self._has_tools:
            try:
                self.tools = await _tools(await self._ask("step", {"type": "list_tools"}))
            except (_Refused, ToolServerError) as refusal:
                raise EnvironmentFault(f"openenv: the server lists no tools that can be used: {refusal}") from refusal
        *first, last = self.read_row(example)
        content = last["content"]
        if isinstance(content, list):  # with images
            return (*first, {**last, "content": [*content, {"type": "text", "text": text}] if text else content})
        return (*first, {**last, "content": "\n\n".join(filter(None, (content, text)))})

    async def step(self, message: Message) -> Step:
        """Send the turn as an action. Raises `EnvironmentFault` if the server fails or its answer cannot be used."""
        if self._has_tools:
            return await self._call_tools(message)
        try:
            result = await self._ask("step", self._action(str(message.get("content") or "")))
        except _Refused as refusal:
            return Step(messages=(_user(f"error: {refusal}"),), outcome={"invalid_actions": 1})
        outcome = {"steps": 1, **_reward(result)}
        self._is_over = bool(result["done"])
        if self._is_over:
            return Step(done=True, outcome=outcome)
        return Step(messages=(_user(self._text(result)),), outcome=outcome)

    async def conclude(self) -> Mapping[str, Any]:
        """Add a reward of 0, so that episodes of refused actions, and those at the limit of turns, have one."""
        return {} if self._is_over else {"environment_reward": 0.0}

    async def close(self) -> None:
        """End the session, so that the server lets go of its environment, and free its place for another one."""
        socket, session, slot = self._socket, self._session, self._slot
        self._socket = self._session = self._slot = None
        try:
            with suppress(aiohttp.ClientError, ConnectionError, TimeoutError, RuntimeError):
                async with asyncio.timeout(min(5.0, self._timeout_s)):
                    if socket is not None and not socket.closed:
                        await socket.send_json({"type": "close"})
                        await socket.close()
            if session is not None:
                await session.close()
        finally:
            if slot is not None:
                slot.release()

    async def _open(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        """Connect and reset. A server that is full is asked again until the deadline."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        self._session = aiohttp.ClientSession()
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    self._socket = await self._session.ws_connect(self._url, max_msg_size=MAX_MESSAGE_BYTES)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise EnvironmentFault(
                    f"openenv: no server at {self._url} ({type(error).__name__}: {error}); start it, or set "
                    "environment.settings.url"
                ) from error
            try:
                return await self._ask("reset", wanted)
            except _Refused as refusal:
                raise EnvironmentFault(f"openenv: the server refuses to reset: {refusal}") from refusal
            except _Full as full:
                await self._socket.close()
                if asyncio.get_running_loop().time() > deadline:
                    raise EnvironmentFault(
                        f"openenv: {full}; raise max_concurrent_envs of the server, or set "
                        "environment.settings.max_concurrent to it"
                    ) from full
                await asyncio.sleep(RETRY_S)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `data` of the server's observation. Raises `EnvironmentFault`, `_Refused`, `_Full`."""
        if self._socket is None:
            raise EnvironmentFault("openenv: the session is over")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_json({"type": kind, "data": dict(data)})
                answer = await self._socket.receive()
        except TimeoutError:
            raise EnvironmentFault(
                f"openenv: no answer to {kind!r} in {self._timeout_s:g} s; raise environment.settings.timeout_s"
            ) from None
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            raise EnvironmentFault(f"openenv: the server is gone ({type(error).__name__}: {error})") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFault(
                f"openenv: the server ended the session ({answer.type.name}: {answer.extra or answer.data})"
            )
        return _checked(answer.data, asked=kind)

    def _action(self, text: str) -> Mapping[str, Any]:
        if self._action_field is not None:
            return {self._action_field: text}
        try:
            action = read_json(text)
        except ValueError as error:
            raise _Refused(f"the action is not JSON: {error}") from error
        if not isinstance(action, dict):
            raise _Refused(f"the action must be a JSON object, found {type(action).__name__}")
        return action

    def _text(self, result: Mapping[str, Any]) -> str:
        observation = result["observation"]
        if self._observation_field is not None:
            if self._observation_field not in observation:
                is_known = (self._url, self._observation_field) in _known_fields
                raise (EnvironmentFault if is_known else ConfigError)(
                    f"environment openenv: the observation has no field {self._observation_field}; it has "
                    f"{', '.join(observation) or 'none'}; set environment.settings.observation_field"
                )
            _known_fields.add((self._url, self._observation_field))
            observation = observation[self._observation_field]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    async def _call_tools(self, message: Message) -> Step:
        """Make each call of the turn a step, in order. A turn without a call ends the episode."""
        outcome: dict[str, Any] = {"steps": 0}
        messages: list[Message] = []
        calls = message.get("tool_calls") or ()
        is_done = not calls and not message.get("tool_call_errors")
        for call in calls:
            name, arguments = str(call["function"]["name"]), call["function"].get("arguments")
            try:
                arguments = read_json(arguments) if isinstance(arguments, str) else arguments
                if not isinstance(arguments, dict):
                    raise _Refused("the arguments are not a JSON object")
                result = await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
                outcome["steps"] += 1
                for key, value in _reward(result).items():
                    outcome[key] = outcome.get(key, 0.0) + value
                content = _tool_text(result["observation"])
                is_done = self._is_over = bool(result["done"])
            except (_Refused, ValueError) as refusal:
                content = f"error: {refusal}"
                outcome["invalid_actions"] = outcome.get("invalid_actions", 0) + 1
            messages.append(
                {"role": "tool", "name": name, "tool_call_id": str(call.get("id", "")), "content": _clean(content)}
            )
            if is_done:
                break
        if message.get("tool_call_errors") and not is_done:
            outcome["invalid_actions"] = outcome.get("invalid_actions", 0) + 1
            messages.append(_user(f"error: the tool call could not be read: {message['tool_call_errors'][0]}"))
        return Step(done=True, outcome=outcome) if is_done else Step(messages=tuple(messages), outcome=outcome)


class _Full(Exception):
    """All sessions of the server are taken."""


def _checked(text: str, *, asked: str) -> Mapping[str, Any]:
    try:
        answer = read_json(text, is_finite=False)
        kind, data = answer["type"], answer["data"]
        if kind == "error":
            code, message = data.get("code"), str(data.get("message", "no message"))
            if code == "VALIDATION_ERROR":
                raise _Refused(f"{message}: {_problems(data)}")
            if code == "CAPACITY_REACHED" and asked == "reset":
                raise _Full(message)
            raise EnvironmentFault(f"openenv: the environment failed ({code}: {message})")
        if kind != "observation" or not isinstance(data["observation"], dict) or not isinstance(data["done"], bool):
            raise TypeError("it is not an observation")
        return data
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            f'openenv: the server answered {text[:120]!r}, expected {{"type": "observation", "data": {{"observation", '
            f'"reward", "done"}}}} ({type(error).__name__}: {error})'
        ) from error


def _problems(data: Mapping[str, Any]) -> str:
    """Return what pydantic says about an action, without the links to its manual."""
    errors = data.get("errors")
    entries = errors if isinstance(errors, list) else []
    problems = [
        f"{'.'.join(map(str, error.get('loc') or ()))} {error.get('msg')}"
        for error in entries
        if isinstance(error, Mapping)
    ]
    return "; ".join(problems[:5])[:500] or "no details"


def _reward(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the reward of a step as an outcome; nothing without one."""
    reward = result.get("reward")
    if reward is None:
        return {}
    try:
        return {"environment_reward": read_number(reward)}
    except ValueError as error:
        raise EnvironmentFault(f"openenv: its reward is not as expected a finite number: {error}") from error


async def _tools(result: Mapping[str, Any]) -> Tools:
    try:
        tools = result["observation"]["tools"]
        specs = [(tool["name"], tool.get("description"), tool["input_schema"]) for tool in tools]
    except (KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault(f"openenv: the server lists no tools ({type(error).__name__}: {error})") from error
    return await read_tools(specs)


def _tool_text(observation: Mapping[str, Any]) -> str:
    if observation.get("error"):
        return f"error: {json.dumps(observation['error'], ensure_ascii=False)}"
    result = observation.get("result", observation)
    if isinstance(result, Mapping) and "data" in result:  # fastmcp's result beside its content blocks
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _user(text: str) -> Message:
    return {"role": "user", "content": _clean(text)}


def _clean(text: str) -> str:
    """Replace lone surrogates, which a JSON server may send and a tokenizer cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
