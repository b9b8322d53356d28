"""Conversations of one episode with the engine, and the record of their calls.

The prompt of a turn is the ids of the last call plus the ids of the new messages. Where that cannot be proven to match
the chat template, the conversation is rendered again and the call tree branches (`rollout/episode/rows.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from lockstep.rollout.chat.messages import Tools
from lockstep.rollout.engine.protocol import Engine, Sampling
from lockstep.rollout.errors import CallLimitError, ContextFullError, EngineError, EvidenceError, LockstepError
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, Message, PromptIds, PromptSharing
from lockstep.rollout.safe_text import error_text
from lockstep.rollout.system.deadline import uncounted

if TYPE_CHECKING:  # it imports transformers, which takes seconds: environments are made while settings are checked
    from lockstep.rollout.chat.chat import Chat

T = TypeVar("T")


def request_seed(*parts: object) -> int:
    """Return a 31-bit seed that depends on all parts and is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def next_prompt(
    chat: Chat, last_call: EngineCall | None, history: Sequence[Message], new_messages: Sequence[Message], tools: Tools
) -> PromptIds:
    """Return the prompt of the next turn of a conversation: an extension of its last call, or a new rendering.

    history: messages up to the turn of the last call. Raises `TemplateError`, and `ConfigError` if the template drops
    the tools.
    """
    if last_call is not None:
        extension = chat.extend(last_call, history, new_messages, tools)
        if extension is not None:
            return extension
    else:
        chat.require_tools(new_messages, tools)
    return chat.prompt([*history, *new_messages], tools)


class Conversation:
    """A conversation with the model that is trained. Its calls belong to the rollout of the episode."""

    def __init__(self, record: CallRecord, messages: Sequence[Message], tools: Tools, *, seed: int) -> None:
        self._record = record
        self._messages: tuple[Message, ...] = ()
        self._unanswered: tuple[Message, ...] = ()
        self._tools = tools
        self._seed = seed
        self._num_turns = 0
        self._is_asking = False
        self.last_call: EngineCall | None = None
        self.sampled_at: dict[int, int] = {}
        """Index of the message that each call sampled, by the `id` of the call in the record."""
        self.add(messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far, assistant turns included, with images named by digests."""
        return self._messages + self._unanswered

    def add(self, messages: Sequence[Message]) -> None:
        """Append messages that the model reads before its next turn. Raises `TemplateError` for unreadable images."""
        self._unanswered += tuple(self._record.chat.with_digests(messages))

    async def ask(self, new_messages: Sequence[Message] = ()) -> Message:
        """Append messages and sample the assistant's turn, with a seed of its own.

        Raises:
            ContextFullError: the conversation no longer fits the model.
            CallLimitError: the episode has no calls left, or is over.
            ConfigError: the chat template drops the tools.
            TemplateError: the chat template refuses the messages.
            EngineError, EvidenceError: the engine failed. The episode ends with it, even if it is caught here.
        """
        if self._is_asking:
            raise RuntimeError("this conversation waits for an answer; ask one thing at a time, or open another one")
        self._is_asking = True
        try:
            prompt = await self._record.beside(lambda: self._next_prompt(new_messages))
            seed = request_seed(self._seed, self._num_turns)
            call = await self._record.sample(prompt, images=prompt.images, seed=seed)
        finally:
            self._is_asking = False
        message = self._record.chat.parse(call.sampled_ids, self._tools, prompt_ids=call.prompt_ids)
        self.sampled_at[id(call)] = len(self.messages)
        self._messages, self._unanswered = (*self.messages, message), ()
        self._num_turns += 1
        self.last_call = call
        return message

    def _next_prompt(self, new_messages: Sequence[Message]) -> PromptIds:
        self.add(new_messages)
        prompt = next_prompt(self._record.chat, self.last_call, self._messages, self._unanswered, self._tools)
        if self._record.chat.images is not None:
            self._record.chat.images.refuse_too_many(prompt)
        return prompt


class CallRecord:
    """Calls of one episode in order of arrival, and their limits."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        sampling: Sampling,
        seed: int,
        max_calls: Callable[[], int | None] = lambda: None,
    ) -> None:
        """max_calls: read before each call, because it may depend on the data row; None for no limit."""
        self.chat = chat
        self.calls: list[EngineCall] = []
        self.max_calls = max_calls
        self.failure: LockstepError | None = None
        """First failure of the engine or its evidence: it ends the episode, even if an environment caught it."""
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._sharing = PromptSharing()
        self._num_begun = 0
        self._num_opened = 0
        self._is_closed = False

    async def beside(self, work: Callable[[], T]) -> T:
        """Return what work on messages returns. Images are read in a thread: one may take 0.3 s of all episodes."""
        return work() if self.chat.images is None else await asyncio.to_thread(work)

    def open(self, messages: Sequence[Message], tools: Tools = ()) -> Conversation:
        """Open a conversation beside the episode's own, seeded by its number: negative, since turns count from 0."""
        self._num_opened += 1
        return Conversation(self, messages, tools, seed=request_seed(self._seed, -self._num_opened))

    async def sample(self, prompt_ids: Sequence[int], *, images: Sequence[ImageSpan] = (), seed: int) -> EngineCall:
        """Make one engine call. Raises as `Conversation.ask` does, `EvidenceError` also for an aborted call."""
        self._refuse_if_closed()
        max_calls = self.max_calls()
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
            with uncounted():
                call = self._sharing.add(await self._engine.generate(prompt_ids, request, images))
            self._refuse_if_closed()  # an answer after the end
            self.calls.append(call)
            if call.finish_reason is FinishReason.ABORT:
                raise EvidenceError("the engine aborted the request")
        except CallLimitError:
            raise
        except Exception as error:
            if not isinstance(error, LockstepError):
                error = EngineError(f"the engine raised {type(error).__name__}: {error_text(error)}")
            self.failure = self.failure or error
            raise error
        return call

    def raise_failure(self) -> None:
        """Raise the first failure of any conversation; an environment may have caught it."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self._is_closed = True

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise CallLimitError("the episode is over")
