"""Environment `agent`: a user's agent, a function of an OpenAI base URL and a key.

    async def agent(base_url, api_key, example):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...                                         any number of requests, in any order, with any messages
        return {"tests_passed": 3}                  facts for rewards, a text (the fact `answer`), or nothing

It may be a plain function and may start other programs, as long as its requests go to `base_url` with `api_key`: the
gateway, where the calls are recorded that are the rollout.

Covered: an agent that hangs, raises, or makes requests without end costs its own episode and no other. Each agent runs
in a thread and an event loop of its own, so a blocking call blocks no other episode; `shared_loop` gives that up.

Not covered: agents run with your rights, without a sandbox. One that hangs is abandoned, not stopped
(`rollout/system/deadline.py`); its key is no longer valid.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from lockstep.integrations.gateway.server import Gateway
from lockstep.integrations.gateway.session import CONTEXT_FULL, TOO_MANY_IMAGES, TOO_MANY_REQUESTS
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.drivers import RunEpisode, Table
from lockstep.rollout.episode.contract import read_facts
from lockstep.rollout.episode.ending import ending
from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.system.background_loop import shared_loop
from lockstep.rollout.system.deadline import DeadlineExceeded, Finished, call_with_deadline, is_async

GRACE_S = 1.0
"""Time for an async agent, canceled at its deadline, to clean up before its thread is abandoned."""

_OTHER_LOOP = re.compile(r"Event loop is closed|different (event )?loop")
_LIMITS = {
    CONTEXT_FULL: RolloutStatus.CONTEXT_FULL,
    TOO_MANY_IMAGES: RolloutStatus.CONTEXT_FULL,
    TOO_MANY_REQUESTS: RolloutStatus.MAX_TURNS,
}


@asynccontextmanager
async def at_the_gateway(table: Table, environments: Sequence[Any]) -> AsyncIterator[RunEpisode]:
    """Play agents, which ask the model at the gateway. Those of one class have their limit of episodes at once."""
    slots = {type(one): asyncio.Semaphore(one.max_concurrent) for one in environments}
    gateway = Gateway(engine=table.engine, chat=table.chat, offered=[table.sampling], settings=table.gateway)
    async with gateway:
        yield partial(run_agent_episode, gateway=gateway, slots=slots)


class AgentEnvironment(RunsItself):
    declaration = Declaration(max_turns=16, driver=at_the_gateway, uses_gateway=True, is_deterministic=False)

    def __init__(self, agent: str | Callable[..., Any] | None = None, *, shared_loop: bool = False, **limits: Any):
        """agent, limits: `function`, `timeout_s` and `max_concurrent` of `RunsItself`.

        shared_loop: run all episodes of an async agent in one event loop, for clients that it keeps between episodes;
        a call that blocks then blocks them all. False: each episode has a thread and an event loop of its own.

        Raises `ConfigError` as `RunsItself` does, for other parameters, and for a shared loop of an agent that is not
        async.
        """
        super().__init__("agent", agent, **limits)
        _refuse_signature(self.function)
        if shared_loop and not is_async(self.function):
            raise ConfigError(
                "environment.settings.shared_loop=true, but the agent is no `async def` function, so it has no event "
                "loop; leave shared_loop out"
            )
        self.shared_loop = shared_loop


def _refuse_signature(agent: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(agent)
    except ValueError:  # a function that tells none
        return
    try:
        parameters.bind("base_url", "api_key", {})
    except TypeError as error:
        name = getattr(agent, "__name__", type(agent).__name__)
        raise ConfigError(
            f"the agent {name}{parameters} cannot be called with (base_url, api_key, example): {error}; write "
            f"`def {name}(base_url, api_key, example)`"
        ) from None


async def run_agent_episode(
    *,
    gateway: Gateway,
    slots: Mapping[type, asyncio.Semaphore],
    environment: AgentEnvironment,
    example: Mapping[str, Any],
    sampling: Sampling,
    max_turns: int,
    rollout_id: int,
    group_id: int,
    seed: int,
) -> Rollout:
    """Run an agent on one data row, as `run_episode` runs an environment.

    Requests are seeded in their order of arrival, so a deterministic agent that makes one request at a time gets the
    same answers in every run. `messages` are those of the last request and its answer.

    The rollout is FAILED if the agent raises, does not end in time, or returns no facts.
    If it was refused for the limit of requests (`max_turns`) or of the context, the samples before are trained. One of
    the `slots` of its class is held while the agent runs.

    Raises `EngineError` if the engine failed, `ConfigError` if the chat template drops the tools of its requests.
    """
    session = gateway.open_session(sampling=sampling, seed=seed, max_requests=max_turns)
    try:
        async with slots[type(environment)]:
            start = time.perf_counter()
            result = await _run(environment, gateway.url_of(session), session.key, dict(example))
    finally:
        gateway.close_session(session)
    limit = _LIMITS.get(session.refusal or "")
    calls = session.calls
    status, error = ending("the agent", error=result.error, failure=session.failure, limit=limit, calls=calls)
    if status is RolloutStatus.FAILED and error and _met_another_loop(result.error):
        error = (
            f"{error} (it used a client of another episode's event loop: make clients inside the agent, or set "
            "environment.settings.shared_loop=true)"
        )
    if status is RolloutStatus.COMPLETED and not calls:
        status, error = RolloutStatus.FAILED, "the agent made no request; it must call the base_url that it is given"
    outcome: dict[str, Any] = {}
    try:
        value = {"answer": result.value} if isinstance(result.value, str) else result.value
        outcome = {} if value is None else read_facts(value)
    except ValueError as problem:
        status, error = RolloutStatus.FAILED, f"the agent returned {problem}"
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=calls,
        messages=session.last_conversation,
        call_messages=session.call_messages,
        example=example,
        status=status,
        outcome={**outcome, **session.facts},
        error=error,
        duration_s=time.perf_counter() - start,
    )


async def _run(environment: AgentEnvironment, *arguments: Any) -> Finished:
    agent, limit_s = environment.function, environment.timeout_s
    if environment.shared_loop:
        call = call_with_deadline(agent, *arguments, timeout_s=limit_s)
        return await asyncio.wrap_future(shared_loop().submit(call))
    return await call_with_deadline(_in_own_loop(agent, limit_s), *arguments, timeout_s=limit_s + GRACE_S)


def _in_own_loop(agent: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    """Return the agent as a plain function, to be run in a thread."""
    if not is_async(agent):
        return agent

    async def in_time(*arguments: Any) -> Any:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await agent(*arguments)
        except TimeoutError as error:
            if deadline.expired():
                raise DeadlineExceeded(f"no end in {timeout_s:g} s") from None
            raise error

    return lambda *arguments: asyncio.run(in_time(*arguments))


def _met_another_loop(error: BaseException | None) -> bool:
    """Return True if the error, or one that led to it, is asyncio's about an object of another event loop."""
    errors: set[BaseException] = set()
    while error is not None and error not in errors:
        if isinstance(error, RuntimeError) and _OTHER_LOOP.search(str(error)):
            return True
        errors.add(error)
        error = error.__cause__ or error.__context__
    return False
