"""One episode of somebody else's agent: it talks to the gateway, and what was sampled for it is the rollout.

Covered: an agent that hangs, raises, or makes requests for ever costs its own episode and no other. An agent runs in
a thread of its own with a loop of its own, so one that blocks blocks nobody.

Not covered: agents are your code and run with your rights; there is no sandbox. One that hangs is abandoned, not
stopped (`rollout/system/deadline.py`); its key opens nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollout.engine.protocol import Sampling
from rollout.environments.agent import AgentEnvironment
from rollout.errors import ConfigError, EngineError
from rollout.gateway.server import Gateway
from rollout.gateway.session import CONTEXT_FULL, TOO_MANY_REQUESTS, Session
from rollout.records import FinishReason, Rollout, RolloutStatus
from rollout.system.deadline import DeadlineExceeded, call_with_deadline, is_async

GRACE_S = 1.0
"""An async agent is cancelled at its deadline and has this long to clean up before its thread is given up."""

_LIMITS = {CONTEXT_FULL: RolloutStatus.CONTEXT_FULL, TOO_MANY_REQUESTS: RolloutStatus.MAX_TURNS}


async def run_agent_episode(
    *,
    gateway: Gateway,
    slots: asyncio.Semaphore,
    environment: AgentEnvironment,
    example: Mapping[str, Any],
    sampling: Sampling,
    max_turns: int,
    rollout_id: int,
    group_id: int,
    seed: int,
) -> Rollout:
    """Run an agent on one data row, as `run_episode` runs an environment.

    Requests are seeded in their order of arrival, so an agent that is deterministic and makes one request at a time
    gets the same answers in every run. `messages` are those of the last request and its answer.

    The rollout is FAILED where the agent raises or does not end in time, except after it was refused for the limit of
    turns or of the context: then what was sampled is trained. An engine that fails raises `EngineError`, an agent
    that returns something else than a mapping or None `ConfigError`.

    Args:
        gateway: running.
        slots: held while the agent runs.
    """
    session = gateway.open_session(sampling=sampling, seed=seed, max_requests=max_turns)
    try:
        async with slots:
            started = time.perf_counter()
            finished = await call_with_deadline(
                _in_own_loop(environment.agent, environment.timeout_s),
                gateway.base_url,
                session.key,
                dict(example),
                timeout_s=environment.timeout_s + GRACE_S,
            )
    finally:
        gateway.close_session(session)
    if isinstance(session.failure, EngineError):
        raise session.failure
    status, error = _ending(session, finished.error)
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=session.calls,
        messages=session.last_conversation,
        example=example,
        status=status,
        outcome={**_outcome(finished.value), **{f"prompts_{kind}": n for kind, n in session.prompts.items()}},
        error=error,
        duration_s=time.perf_counter() - started,
    )


def _in_own_loop(agent: Callable[..., Any], timeout_s: float) -> Callable[..., Any]:
    """The agent as a plain function, to be run in a thread."""
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


def _ending(session: Session, error: BaseException | None) -> tuple[RolloutStatus, str | None]:
    if session.failure is not None:
        return RolloutStatus.FAILED, f"{type(session.failure).__name__}: {session.failure}"
    if session.refusal in _LIMITS:
        return _LIMITS[session.refusal], None
    if isinstance(error, DeadlineExceeded):
        return RolloutStatus.FAILED, f"the agent did not finish: {error}; raise environment.settings.timeout_s"
    if error is not None:
        return RolloutStatus.FAILED, f"the agent raised {type(error).__name__}: {error}"
    calls = session.calls
    if not calls:
        return RolloutStatus.FAILED, "the agent made no request; it must call the base_url that it is given"
    was_cut = calls[-1].finish_reason is FinishReason.LENGTH
    return (RolloutStatus.TRUNCATED if was_cut else RolloutStatus.COMPLETED), None


def _outcome(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"the agent returned {type(value).__name__}, expected None or a dictionary of facts for the rewards"
        )
    return value
