"""One episode: an environment and the engine take turns until one of them is done.

Calls of further conversations that the environment opens (sub-agents) join the same rollout in order of arrival.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.episode.conversation import CallRecord, Conversation
from lockstep.rollout.episode.environment import Closes, Concludes, Environment, HostsConversations
from lockstep.rollout.errors import CallLimitError, ContextFullError, EnvironmentFault, EvidenceError, TemplateError
from lockstep.rollout.records import FinishReason, Rollout, RolloutStatus


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
) -> Rollout:
    """Run one episode on one data row. Each turn is sampled with its own seed, derived from `seed`.

    The rollout is FAILED, with the sentence of the error, if the engine's evidence cannot be trusted, the template
    cannot be rendered, or the process or server of the environment fails. A dead engine raises `EngineError`, a
    template that drops the environment's tools `ConfigError`.
    max_turns: of the episode's own conversation only.
    """
    started = time.perf_counter()
    host = environment if isinstance(environment, HostsConversations) else None
    record = CallRecord(
        engine=engine,
        chat=chat,
        sampling=sampling,
        seed=seed,
        max_calls=lambda: None if host is None else host.max_calls,
    )
    if host is not None:
        host.host(record.open)
    conversation = None
    outcome: dict[str, Any] = {}
    error = None
    try:
        conversation = Conversation(record, await environment.reset(example), environment.tools, seed=seed)
        status = await _take_turns(conversation, environment, record, outcome, max_turns=max_turns)
        if isinstance(environment, Concludes):
            with suppress(ContextFullError, CallLimitError):  # of a last question to the model; earlier samples count
                _merge(outcome, await environment.conclude())
        record.raise_failure()
    except (EvidenceError, TemplateError, EnvironmentFault) as failure:
        status, error = RolloutStatus.FAILED, f"{type(failure).__name__}: {failure}"
    finally:
        record.close()
        if isinstance(environment, Closes):
            await environment.close()
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=tuple(record.calls),
        messages=() if conversation is None else conversation.messages,
        example=example,
        status=status,
        outcome=outcome,
        error=error,
        duration_s=time.perf_counter() - started,
    )


async def _take_turns(
    conversation: Conversation, environment: Environment, record: CallRecord, outcome: dict[str, Any], *, max_turns: int
) -> RolloutStatus:
    for _ in range(max_turns):
        try:
            message = await conversation.ask()
            step = await environment.step(message)  # which may ask in conversations of its own
        except (ContextFullError, CallLimitError) as limit:
            record.raise_failure()
            return RolloutStatus.CONTEXT_FULL if isinstance(limit, ContextFullError) else RolloutStatus.MAX_TURNS
        record.raise_failure()
        conversation.add(step.messages)
        _merge(outcome, step.outcome)
        if step.done:
            assert conversation.last_call is not None
            was_cut = conversation.last_call.finish_reason is FinishReason.LENGTH
            return RolloutStatus.TRUNCATED if was_cut else RolloutStatus.COMPLETED
    return RolloutStatus.MAX_TURNS


def _merge(outcome: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Add up numbers of the same name; of anything else keep the last one."""
    for name, value in facts.items():
        adds_up = _is_number(value) and _is_number(outcome.get(name))
        outcome[name] = outcome[name] + value if adds_up else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
