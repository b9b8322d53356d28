"""One episode: an environment and the engine take turns until one of them is done.

Messages become tokens in `rollout/chat.py`, once and only forward: the prompt of a turn is the tokens of the last
call plus the tokens of what the environment answered. Where that cannot be proven to be what the template would
show, the conversation is rendered anew and the call tree branches (`rollout/rows.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.chat import Chat
from rollout.engine import Engine, Sampling
from rollout.environment import Environment
from rollout.errors import EvidenceError, TemplateError
from rollout.records import EngineCall, FinishReason, Message, Rollout, RolloutStatus


def request_seed(*parts: int) -> int:
    """A 31-bit seed that depends on all parts and is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


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

    Evidence that cannot be trusted and templates that cannot be rendered make the rollout FAILED with the sentence
    of the error; a dead engine raises `EngineError`.
    """
    started = time.perf_counter()
    messages: list[Message] = list(await environment.reset(example))
    calls: list[EngineCall] = []
    outcome: Counter[str] = Counter()
    facts: dict[str, Any] = {}
    status, error = RolloutStatus.MAX_TURNS, None
    tools = environment.tools
    try:
        prompt_ids: Sequence[int] | None = chat.prompt(messages, tools)
        for turn in range(max_turns):
            room = engine.max_model_len - len(prompt_ids)
            if room < 1:
                status = RolloutStatus.CONTEXT_FULL
                break
            request = replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=request_seed(seed, turn))
            call = await engine.generate(prompt_ids, request)
            calls.append(call)
            message = chat.parse(call.sampled_ids, tools)
            history = tuple(messages)
            messages.append(message)
            if call.finish_reason is FinishReason.ABORT:
                status, error = RolloutStatus.FAILED, "the engine aborted the request"
                break
            step = await environment.step(message)
            messages.extend(step.messages)
            for name, value in step.outcome.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    outcome[name] += value  # type: ignore[assignment]
                else:
                    facts[name] = value
            if step.done:
                cut = call.finish_reason is FinishReason.LENGTH
                status = RolloutStatus.TRUNCATED if cut else RolloutStatus.COMPLETED
                break
            if turn + 1 == max_turns:
                break
            extended = chat.extend(call, (*history, message), step.messages, tools)
            prompt_ids = chat.prompt(messages, tools) if extended is None else extended
    except (EvidenceError, TemplateError) as failure:
        status, error = RolloutStatus.FAILED, f"{type(failure).__name__}: {failure}"
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=tuple(calls),
        messages=tuple(messages),
        example=example,
        status=status,
        outcome={**facts, **outcome},
        error=error,
        duration_s=time.perf_counter() - started,
    )
