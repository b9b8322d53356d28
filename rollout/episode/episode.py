"""One episode: an environment and the engine take turns until one of them is done.

Calls of further conversations that the environment opens (sub-agents) join the same rollout in order of arrival.

Covered: whatever an environment's methods raise or return, and a method that awaits too long, costs its episode and no
other. Not covered: a method that blocks the event loop, and then stops all episodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.episode.contract import opening_problem, outcome_problem, read_facts, step_problem, tools_problem
from lockstep.rollout.episode.conversation import CallRecord, Conversation
from lockstep.rollout.episode.environment import Closes, Concludes, Environment, HostsConversations, ShowsImages
from lockstep.rollout.errors import (
    CallLimitError,
    ConfigError,
    ContextFullError,
    EngineError,
    EnvironmentFault,
    LockstepError,
)
from lockstep.rollout.records import FinishReason, Rollout, RolloutStatus
from lockstep.rollout.system.deadline import Clock, DeadlineExceeded
from lockstep.rollout.system.user_functions import fault

if TYPE_CHECKING:  # it imports transformers, which takes seconds: environments are made while settings are checked
    from lockstep.rollout.chat.chat import Chat

CLOSE_S = 30.0
"""Time for a canceled episode to close its environment [s]."""
CALL_TIMEOUT_S = 600.0
"""Default limit of one call of an environment's method, without the engine, tools, and waits for a place [s]."""


async def run_episode(
    *,
    engine: Engine,
    chat: Chat,
    environment: Environment,
    example: Mapping[str, Any],
    sampling: Sampling,
    max_turns: int,
    rollout_id: int,
    group_id: int,
    seed: int,
    call_timeout_s: float = CALL_TIMEOUT_S,
) -> Rollout:
    """Run one episode on one data row. Each turn is sampled with its own seed, derived from `seed`.

    The rollout is FAILED, with a sentence, if a method of the environment raises, takes longer than `call_timeout_s`,
    or returns what it must not, if the engine's evidence cannot be trusted, or the template cannot be rendered. Raises
    `EngineError` for a dead engine, `ConfigError` of the environment, or for a template that drops its tools.
    max_turns: of the episode's own conversation only.
    """
    start = time.perf_counter()
    if chat.images is not None and isinstance(environment, ShowsImages):
        environment.sees_images = True
    record = CallRecord(engine=engine, chat=chat, sampling=sampling, seed=seed)
    episode = _Episode(environment, record, call_timeout_s)
    # A task that can be left alone; one for all methods, because contexts must end in the task that began them.
    task = asyncio.create_task(episode.play(example, max_turns=max_turns, seed=seed))
    try:
        await asyncio.wait({task, episode.is_stuck}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task, episode.is_stuck}, timeout=CLOSE_S, return_when=asyncio.FIRST_COMPLETED)
        record.close()
    status, error = task.result() if task.done() else (RolloutStatus.FAILED, episode.is_stuck.result())
    sampled_at = {} if episode.conversation is None else episode.conversation.sampled_at
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=tuple(record.calls),
        messages=() if episode.conversation is None else episode.conversation.messages,
        call_messages=tuple(sampled_at.get(id(call)) for call in record.calls),
        example=example,
        status=status,
        outcome=episode.outcome,
        error=error,
        duration_s=time.perf_counter() - start,
    )


class _Episode:
    """State of an episode that is played."""

    def __init__(self, environment: Environment, record: CallRecord, call_timeout_s: float) -> None:
        self.conversation: Conversation | None = None
        self.outcome: dict[str, Any] = {}
        self.is_stuck: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with a sentence, once a method ignores its cancellation."""
        self.unanswered: str | None = None
        """Sentence on a prompt that fills the context, so that nothing was sampled."""
        self._environment, self._record, self._call_timeout_s = environment, record, call_timeout_s

    async def play(self, example: Mapping[str, Any], *, max_turns: int, seed: int) -> tuple[RolloutStatus, str | None]:
        """Return the status, and a sentence if it is FAILED or nothing was sampled. Raises as `failure_of`."""
        failure, status = None, RolloutStatus.FAILED
        try:
            status = await self._converse(example, max_turns=max_turns, seed=seed)
        except BaseException as error:
            failure = error
        self._record.close()
        try:
            if isinstance(self._environment, Closes):
                await self._call("close", self._environment.close)
        except BaseException as error:
            failure = failure or error
        failure = self._record.failure or failure
        return (status, self.unanswered) if failure is None else (RolloutStatus.FAILED, failure_of(failure))

    async def _converse(self, example: Mapping[str, Any], *, max_turns: int, seed: int) -> RolloutStatus:
        environment, record = self._environment, self._record
        await self._call("host", self._host)
        opening = await self._call("reset", lambda: environment.reset(example), opening_problem)
        tools = await self._call("tools", self._tools, tools_problem)
        self.conversation = await record.beside(lambda: Conversation(record, opening, tools, seed=seed))
        status = await self._take_turns(self.conversation, max_turns=max_turns)
        if isinstance(environment, Concludes):
            with suppress(ContextFullError, CallLimitError):  # of a last question to the model; earlier samples count
                _merge(self.outcome, await self._call("conclude", environment.conclude, outcome_problem))
        return status

    async def _take_turns(self, conversation: Conversation, *, max_turns: int) -> RolloutStatus:
        record = self._record
        for _ in range(max_turns):
            try:
                message = await conversation.ask()
                # It may ask in conversations of its own.
                step = await self._call("step", lambda message=message: self._environment.step(message), step_problem)
            except (ContextFullError, CallLimitError) as limit:
                record.raise_failure()
                if not record.calls:
                    self.unanswered = (
                        f"prompt too long: {limit}; raise rollout.max_model_len, or set data.max_prompt_tokens"
                    )
                return RolloutStatus.CONTEXT_FULL if isinstance(limit, ContextFullError) else RolloutStatus.MAX_TURNS
            record.raise_failure()
            await record.beside(lambda step=step: conversation.add(step.messages))
            _merge(self.outcome, step.outcome)
            if step.done:
                assert conversation.last_call is not None
                was_cut = conversation.last_call.finish_reason is FinishReason.LENGTH
                return RolloutStatus.TRUNCATED if was_cut else RolloutStatus.COMPLETED
        return RolloutStatus.MAX_TURNS

    async def _host(self) -> None:
        host = self._environment
        if isinstance(host, HostsConversations):
            host.host(self._record.open)
            self._record.max_calls = lambda: host.max_calls

    async def _tools(self) -> Any:
        return self._environment.tools

    async def _call(
        self,
        method: str,
        function: Callable[[], Awaitable[Any]],
        problem_of: Callable[[Any], str] = lambda value: "",
    ) -> Any:
        """Return what a method returns. Raises `LockstepError`, for any other error an `EnvironmentFault`."""
        where = f"{type(self._environment).__name__}.{method}"
        late = f"{where} did not return in {self._call_timeout_s:g} s; raise environment.call_timeout_s"

        def give_up() -> None:
            if not self.is_stuck.done():
                self.is_stuck.set_result(f"EnvironmentFault: {late}")

        async def awaited() -> Any:
            awaitable = function()
            if not isinstance(awaitable, Awaitable):
                raise EnvironmentFault(f"{where} is not async; write `async def {method}`")
            return await awaitable

        try:
            value = await Clock(self._call_timeout_s, give_up).run(awaited)
            problem = problem_of(value)
        except DeadlineExceeded:
            raise EnvironmentFault(late) from None
        except BaseException as error:
            if _is_own_cancellation(error) or (isinstance(error, LockstepError) and not isinstance(error, EngineError)):
                raise
            raise EnvironmentFault(f"{where} raised {fault(error)}") from error
        if problem:
            raise EnvironmentFault(f"{where} {problem}")
        return value


def failure_of(error: BaseException) -> str:
    """Return why an episode failed. Raises errors of the engine and of settings, and the cancellation of this task."""
    if _is_own_cancellation(error) or isinstance(error, EngineError | ConfigError):
        raise error
    return f"{type(error).__name__}: {error}" if isinstance(error, LockstepError) else fault(error)


def _is_own_cancellation(error: BaseException) -> bool:
    """True unless a method raised it by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _merge(outcome: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Add up numbers of the same name; of anything else keep the last one."""
    for name, value in read_facts(facts).items():
        adds_up = _is_number(value) and _is_number(outcome.get(name))
        outcome[name] = outcome[name] + value if adds_up else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
