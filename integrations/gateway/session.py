"""Record of the calls of one client, which splices look up and training reads.

A session belongs to one API key or one path. Whatever a harness does to the messages between two requests, the calls
stay here with the engine's ids and logprobs.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lockstep.integrations.gateway.errors import CONVERSATION, ApiError
from lockstep.integrations.gateway.prefix_chain import Prefix, Prefixes, message_digest
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import LockstepError
from lockstep.rollout.records import EngineCall, Message

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FORGOTTEN = 2**16

CONTEXT_FULL = "context_length_exceeded"
TOO_MANY_REQUESTS = "max_turns_exceeded"
RECORD_FULL = "session_full"
TOO_MANY_IMAGES = "too_many_images"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A sampled answer and its conversation."""

    call: EngineCall
    conversation: Prefix
    """The request and the answer."""
    order: tuple[int, int]
    """Number of the request in its session, and of the choice in the request."""
    num_instructions: int = 0
    """See `SampleRequest.num_instructions`."""
    must_call: bool = False
    """See `SampleRequest.must_call`."""
    stop: str | None = None
    """The stop string that ended the answer."""
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    """Random name, part of the ids that the client sees."""

    @property
    def message(self) -> Message:
        """The assistant message, without ids; the response adds them."""
        return self.conversation.message


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMark:
    """Origin of an assistant message, by ids that the client sent back with it."""

    sampled_ids: tuple[int, ...] | None = None
    name: str | None = None
    """Name of the answer."""

    def fits(self, answer: Answer) -> bool:
        return self.name == answer.name or self.sampled_ids == answer.call.sampled_ids


class Session:
    """Calls of one key or path, found by their message and the conversation before it."""

    def __init__(
        self,
        name: str,
        *,
        offered: Sequence[Sampling],
        seed: int | None = None,
        max_requests: int | None = None,
        max_calls: int = 4096,
        max_tokens: int | None = None,
        any_model: bool = False,
    ) -> None:
        """
        Args:
            offered: sampling settings that requests may ask for; the first is the default.
            seed: seeds the requests together with their number. The client's seed is then ignored: with the same seed
                in every episode all samples of a group would be equal. None: the client decides.
            max_requests: turn limit of an episode; further requests are refused.
            max_calls: limit of recorded answers.
            max_tokens: limit of the ids of all prompts and answers. At this limit and at `max_calls`, the oldest
                answer is forgotten, and a conversation that continues it branches. None: further requests are refused
                at `max_calls`, so that no trained token is lost.
            any_model: accept every model name; a harness may have a fixed one.
        """
        self.name = name
        self.place = name or secrets.token_hex(8)
        """Name in the session's own address (`Gateway.url_of`)."""
        self.key = secrets.token_urlsafe(32)
        self.offered = tuple(offered)
        self.seed = seed
        self.any_model = any_model
        self.prefixes = Prefixes()
        self.prompts: Counter[str] = Counter()
        """Number of prompts by `PromptKind`."""
        self.refusal: str | None = None
        """Error code of the last request, if it was refused at a limit of the session or the model."""
        self.failure: LockstepError | None = None
        """First failure of the engine or its evidence, or of a chat template that drops the tools."""
        self._max_requests = max_requests
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        """Digests of the last conversations whose answers were forgotten."""
        self._has_warned = False
        self._num_requests = 0
        self._free_numbers: list[int] = []
        """Numbers of requests without an answer, as a heap. The next requests get them, and with them their seeds."""
        self._is_closed = False
        self._answers: deque[Answer] = deque()
        self._by_conversation: dict[bytes, list[Answer]] = {}
        self._by_message: Counter[bytes] = Counter()
        self._by_ids: Counter[tuple[int, ...]] = Counter()
        self._by_name: dict[str, Answer] = {}

    @property
    def calls(self) -> tuple[EngineCall, ...]:
        """Calls in the order of their requests."""
        return tuple(answer.call for answer in self._in_order())

    @property
    def facts(self) -> dict[str, int]:
        """Prompts by kind, and the answers that were asked to call a tool, for the outcome of a rollout."""
        num_unforced = sum(answer.must_call for answer in self._answers)
        prompts = {f"prompts_{kind}": count for kind, count in self.prompts.items()}
        return {**prompts, **({"unforced_calls": num_unforced} if num_unforced else {})}

    @property
    def last_conversation(self) -> tuple[Message, ...]:
        """Messages of the last request and its first answer; empty before the first request."""
        return self._last_answer.conversation.messages if self._answers else ()

    @property
    def call_messages(self) -> tuple[int | None, ...]:
        """For each call, the index in `last_conversation` of the turn that it sampled; None: it is not there.

        A client may send a turn back changed, for instance without its reasoning. A turn with the words of an answer is
        that answer, unless the first request has it: nothing was sampled before.
        """
        answers = self._in_order()
        if not answers:
            return ()
        history = self._last_answer.conversation.prefixes[:-1]
        prompt_digests = {prefix.digest for prefix in answers[0].conversation.prefixes[:-1]}
        by_words: dict[bytes, list[Answer]] = {}
        for answer in answers:
            by_words.setdefault(_words(answer.message), []).append(answer)
        places = {self._last_answer.order: len(history)}
        for index, prefix in enumerate(history):
            same = self.find(prefix) or by_words.get(_words(prefix.message), [])
            free = [answer.order for answer in same if answer.order not in places]
            if free and prefix.digest not in prompt_digests:
                places[free[0]] = index
        return tuple(places.get(answer.order) for answer in answers)

    def begin_request(self) -> int:
        """Return the number of a new request, to be ended by `record` or `give_back`. Raises `ApiError` at a limit."""
        if self._max_requests is not None and self._num_open >= self._max_requests:
            raise self.refused(
                f"this session may make {self._max_requests} requests and has made them; "
                "raise environment.max_turns if the agent needs more",
                code=TOO_MANY_REQUESTS,
            )
        if len(self._answers) >= self._max_calls and self._max_tokens is None:
            raise self.refused(
                f"this session has recorded {len(self._answers)} answers; fetch them and delete the session, "
                "or use a session per episode",
                code=RECORD_FULL,
            )
        self.refusal = None
        if self._free_numbers:
            return heapq.heappop(self._free_numbers)
        self._num_requests += 1
        return self._num_requests - 1

    def give_back(self, number: int) -> None:
        """End a request that has no answer, so that it does not count."""
        heapq.heappush(self._free_numbers, number)

    @property
    def is_unused(self) -> bool:
        """True if no request has an answer or waits for one."""
        return self._num_open == 0

    @property
    def _num_open(self) -> int:
        return self._num_requests - len(self._free_numbers)

    def refused(self, message: str, *, code: str) -> ApiError:
        """Return the error for a reached limit, and remember its code, which explains the end of an episode."""
        self.refusal = code
        return ApiError(message, param=CONVERSATION, code=code)

    def failed(self, failure: LockstepError) -> None:
        if self.failure is None:
            self.failure = failure

    def record(self, answers: Sequence[Answer], kind: str) -> None:
        """Record the answers to one request. Does nothing after `close`: the episode has been read."""
        if self._is_closed:
            return
        self.prompts[kind] += 1
        for answer in answers:
            self._answers.append(answer)
            self._num_tokens += len(answer.call.prompt_ids) + len(answer.call.sampled_ids)
            self._by_conversation.setdefault(answer.conversation.digest, []).append(answer)
            self._by_message[message_digest(answer.message)] += 1
            self._by_ids[answer.call.sampled_ids] += 1
            self._by_name[answer.name] = answer
        while self._max_tokens is not None and self._is_too_large(self._max_tokens):
            oldest = self._answers.popleft()
            self._remove_from_index(oldest)
            self._forgotten[oldest.conversation.digest] = None
            if len(self._forgotten) > MAX_FORGOTTEN:
                self._forgotten.popitem(last=False)

    def _is_too_large(self, max_tokens: int) -> bool:
        return len(self._answers) > self._max_calls or (len(self._answers) > 1 and self._num_tokens > max_tokens)

    def remove(self, answers: Sequence[Answer], kind: str) -> None:
        """Remove the answers to one request, which did not reach the client."""
        if self._is_closed:
            return
        self.prompts -= Counter([kind])
        for answer in answers:
            if answer in self._answers:
                self._answers.remove(answer)
                self._remove_from_index(answer)
        self.give_back(answers[0].order[0])

    def find(self, conversation: Prefix) -> list[Answer]:
        """Return the answers with this message (the last) to this conversation (the messages before it)."""
        return self._by_conversation.get(conversation.digest, [])

    def has_sampled(self, message: Message) -> bool:
        """Return True if this session sampled the message, in any conversation."""
        return self._by_message[message_digest(message)] > 0

    def has_forgotten(self, conversation: Prefix) -> bool:
        """Return True if the session had an answer with this message to this conversation. Logs a warning once."""
        if conversation.digest not in self._forgotten:
            return False
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "gateway: a conversation branched because its last answer was forgotten; requests under /v1 share room "
                "for %d answers with %d tokens. Use base_url .../s/<name>/v1 with a name for each agent",
                self._max_calls,
                self._max_tokens,
            )
        return True

    def has_marked(self, mark: TurnMark) -> bool:
        """Return True if the mark is that of an answer of this session."""
        return mark.name in self._by_name or self._by_ids[mark.sampled_ids or ()] > 0

    def answer_named(self, name: str | None) -> Answer | None:
        return None if name is None else self._by_name.get(name)

    def close(self) -> None:
        self._is_closed = True

    @property
    def _last_answer(self) -> Answer:
        """The first answer to the last request."""
        answers = self._in_order()
        return next(answer for answer in answers if answer.order[0] == answers[-1].order[0])

    def _in_order(self) -> list[Answer]:
        return sorted(self._answers, key=lambda answer: answer.order)

    def _remove_from_index(self, answer: Answer) -> None:
        digest = answer.conversation.digest
        del self._by_name[answer.name]
        self._by_conversation[digest].remove(answer)
        if not self._by_conversation[digest]:
            del self._by_conversation[digest]
        _count_down(self._by_message, message_digest(answer.message))
        _count_down(self._by_ids, answer.call.sampled_ids)
        self._num_tokens -= len(answer.call.prompt_ids) + len(answer.call.sampled_ids)


def _words(message: Message) -> bytes:
    """Return a digest of role, text and tool calls, without the reasoning and the space around the text."""
    text = str(message.get("content") or "").strip()
    return message_digest({**message, "content": text, "reasoning_content": None})


def _count_down(counts: Counter[T], key: T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
