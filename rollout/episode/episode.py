"""One episode: an environment and the engine take turns until one of them is done.

Messages become tokens in `rollout/chat/chat.py`, once and only forward: the prompt of a turn is the tokens of the last
call plus the tokens of what the environment answered. Where that cannot be proven to be what the template would
show, the conversation is rendered anew and the call tree branches (`rollout/episode/rows.py`).

An environment may open further conversations (sub-agents). They take their turns through the same class as the
episode's own, and their calls join the same rollout as they arrive.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.chat.chat import Chat
from rollout.engine.protocol import Engine, Sampling
from rollout.episode.environment import Concludes, Environment, HostsConversations, Tools
from rollout.errors import CallLimitError, ContextFullError, EngineError, EvidenceError, LockstepError, TemplateError
from rollout.records import EngineCall, FinishReason, Message, Rollout, RolloutStatus


def request_seed(*parts: int) -> int:
    """A 31-bit seed that depends on all parts and is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class Conversation:
    """Messages and sampled turns of one conversation, and the record that its calls join."""

    def __init__(self, record: CallRecord, messages: Sequence[Message], tools: Tools, *, seed: int) -> None:
        self._record = record
        self._messages: tuple[Message, ...] = ()
        self._unanswered: tuple[Message, ...] = tuple(messages)
        self._tools = tools
        self._seed = seed
        self._num_turns = 0
        self._is_asking = False
        self.last_call: EngineCall | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return self._messages + self._unanswered

    def hear(self, messages: Sequence[Message]) -> None:
        """Take in what the model will read before its next turn."""
        self._unanswered += tuple(messages)

    async def ask(self, new_messages: Sequence[Message] = ()) -> Message:
        """See `rollout.episode.environment.Conversation`. Each turn is sampled with its own seed."""
        if self._is_asking:
            raise RuntimeError("this conversation waits for an answer; ask one thing at a time, or open another one")
        self._is_asking = True
        try:
            self.hear(new_messages)
            call = await self._record.sample(self._next_prompt(), seed=request_seed(self._seed, self._num_turns))
        finally:
            self._is_asking = False
        message = self._record.chat.parse(call.sampled_ids, self._tools)
        self._messages, self._unanswered = (*self.messages, message), ()
        self._num_turns += 1
        self.last_call = call
        return message

    def _next_prompt(self) -> Sequence[int]:
        chat = self._record.chat
        if self.last_call is not None:
            extended = chat.extend(self.last_call, self._messages, self._unanswered, self._tools)
            if extended is not None:
                return extended
        return chat.prompt(self.messages, self._tools)


class CallRecord:
    """The calls of one episode, in order of arrival, and what limits them."""

    def __init__(
        self, *, engine: Engine, chat: Chat, sampling: Sampling, seed: int, max_calls: Callable[[], int | None]
    ) -> None:
        """max_calls: asked before each call, because it may depend on the data row; None is no limit."""
        self.chat = chat
        self.calls: list[EngineCall] = []
        self.failure: LockstepError | None = None
        """The first failure of the engine or its evidence: it ends the episode, even if an environment caught it."""
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._max_calls = max_calls
        self._num_begun = 0
        self._num_opened = 0
        self._is_closed = False

    def open_first(self, messages: Sequence[Message], tools: Tools) -> Conversation:
        """The episode's own conversation. It is seeded alike, whatever was opened before it."""
        return Conversation(self, messages, tools, seed=self._seed)

    def open(self, messages: Sequence[Message], tools: Tools = ()) -> Conversation:
        """A further conversation, seeded by its number: negative, where turns of the first one count from 0."""
        self._num_opened += 1
        return Conversation(self, messages, tools, seed=request_seed(self._seed, -self._num_opened))

    async def sample(self, prompt_ids: Sequence[int], *, seed: int) -> EngineCall:
        """One engine call. Raises as `rollout.episode.environment.Conversation.ask` says; an aborted call is no
        evidence."""
        if self._is_closed:
            raise CallLimitError("the episode is over")
        max_calls = self._max_calls()
        if max_calls is not None and self._num_begun >= max_calls:
            raise CallLimitError(f"the episode has made its {max_calls} engine calls")
        room = self._engine.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextFullError(
                f"the conversation has {len(prompt_ids)} tokens, the model takes {self._engine.max_model_len}"
            )
        self._num_begun += 1
        request = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room), seed=seed)
        try:
            call = await self._engine.generate(prompt_ids, request)
            if not self._is_closed:  # by a conversation that nobody waits for: the rollout has been read
                self.calls.append(call)
            if call.finish_reason is FinishReason.ABORT:
                raise EvidenceError("the engine aborted the request")
        except (EngineError, EvidenceError) as failure:
            self.failure = self.failure or failure
            raise
        return call

    def raise_failure(self) -> None:
        """Raise what failed in any conversation: to an environment that caught it, it was one error of many."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self._is_closed = True


class _Outcome:
    """Facts of an episode: numbers of the same name are added up, of anything else the last one stays."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._facts: dict[str, Any] = {}

    def add(self, facts: Mapping[str, Any]) -> None:
        for name, value in facts.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._sums[name] += value  # type: ignore[assignment]
            else:
                self._facts[name] = value

    def facts(self) -> dict[str, Any]:
        return {**self._facts, **self._sums}


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

    Args:
        max_turns: of the episode's own conversation. Conversations that the environment opens are limited by it.
    """
    started = time.perf_counter()
    host = environment if isinstance(environment, HostsConversations) else None
    max_calls = partial(_max_calls, host)
    record = CallRecord(engine=engine, chat=chat, sampling=sampling, seed=seed, max_calls=max_calls)
    if host is not None:
        host.host(record.open)
    conversation = record.open_first(await environment.reset(example), environment.tools)
    outcome = _Outcome()
    error = None
    try:
        status = await _take_turns(conversation, environment, record, outcome, max_turns=max_turns)
        if isinstance(environment, Concludes):
            with suppress(ContextFullError, CallLimitError):  # it asked once more; what was sampled counts
                outcome.add(await environment.conclude())
        record.raise_failure()
    except (EvidenceError, TemplateError) as failure:
        status, error = RolloutStatus.FAILED, f"{type(failure).__name__}: {failure}"
    finally:
        record.close()
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        calls=tuple(record.calls),
        messages=conversation.messages,
        example=example,
        status=status,
        outcome=outcome.facts(),
        error=error,
        duration_s=time.perf_counter() - started,
    )


def _max_calls(host: HostsConversations | None) -> int | None:
    return None if host is None else host.max_calls


async def _take_turns(
    conversation: Conversation, environment: Environment, record: CallRecord, outcome: _Outcome, *, max_turns: int
) -> RolloutStatus:
    for _ in range(max_turns):
        try:
            message = await conversation.ask()
            step = await environment.step(message)  # which may ask in conversations of its own
        except (ContextFullError, CallLimitError) as limit:
            record.raise_failure()
            return RolloutStatus.CONTEXT_FULL if isinstance(limit, ContextFullError) else RolloutStatus.MAX_TURNS
        record.raise_failure()
        conversation.hear(step.messages)
        outcome.add(step.outcome)
        if step.done:
            assert conversation.last_call is not None
            was_cut = conversation.last_call.finish_reason is FinishReason.LENGTH
            return RolloutStatus.TRUNCATED if was_cut else RolloutStatus.COMPLETED
    return RolloutStatus.MAX_TURNS
