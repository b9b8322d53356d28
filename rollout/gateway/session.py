"""What was sampled for one harness: the record that splices look up and training reads.

A session belongs to one API key or one path. Harnesses need not know of it: whatever they do to messages between two
requests, the calls stay here, with ids and logprobs as the engine gave them, and the call tree is rebuilt from them
(`rollout/episode/rows.py`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout.chat.messages import normalize_messages
from rollout.engine.protocol import Sampling
from rollout.errors import LockstepError
from rollout.gateway.errors import ApiError
from rollout.gateway.messages import without_ids
from rollout.records import EngineCall, Message

Tools = Sequence[Mapping[str, object]]

CONTEXT_FULL = "context_length_exceeded"
TOO_MANY_REQUESTS = "max_turns_exceeded"
RECORD_FULL = "session_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One sampled answer, and the conversation that it answered."""

    call: EngineCall
    history: tuple[Message, ...]
    message: Message
    """The assistant message as the client got it, without ids."""
    order: tuple[int, int]
    """Number of the request in its session, and of the choice in the request."""


class Session:
    """Calls of one key or path, found again by what they said and by what was said before them."""

    def __init__(
        self,
        name: str,
        *,
        offered: Sequence[Sampling],
        seed: int | None = None,
        max_requests: int | None = None,
        max_calls: int = 4096,
        forgets_oldest: bool = False,
        any_model: bool = False,
    ) -> None:
        """
        Args:
            offered: sampling settings that requests may ask for; the first is the default.
            seed: requests are seeded from it and from their number; a client's own seed is then ignored, because one
                that is the same in every episode would make all samples of a group equal. None: the client decides.
            max_requests: further requests are refused (an episode's limit of turns).
            max_calls: recorded at most.
            forgets_oldest: what happens then: the oldest call goes (and a conversation that goes on from it
                branches), or further requests are refused, so that nothing that is trained is lost.
            any_model: accept every model name; a harness may have one written into it.
        """
        self.name = name
        self.key = secrets.token_urlsafe(32)
        self.offered = tuple(offered)
        self.seed = seed
        self.any_model = any_model
        self.prompts: Counter[str] = Counter()
        """How prompts came about: `root`, `extended`, and branches by their reason."""
        self.refusal: str | None = None
        """Code of the error that the last request was refused with, if it was a limit of the session or the model."""
        self.failure: LockstepError | None = None
        """The first failure that was not the client's: of the engine or of its evidence."""
        self._max_requests = max_requests
        self._max_calls = max_calls
        self._forgets_oldest = forgets_oldest
        self._num_requests = 0
        self._is_closed = False
        self._recorded: deque[Recorded] = deque()
        self._keys: deque[bytes] = deque()
        self._by_conversation: dict[bytes, list[Recorded]] = {}
        self._by_message: Counter[bytes] = Counter()
        self._by_ids: Counter[tuple[int, ...]] = Counter()

    @property
    def calls(self) -> tuple[EngineCall, ...]:
        """In the order of the requests."""
        return tuple(recorded.call for recorded in self._in_order())

    @property
    def last_conversation(self) -> tuple[Message, ...]:
        """Messages of the last request, with its first answer. Empty before the first."""
        if not self._recorded:
            return ()
        last_request = max(recorded.order[0] for recorded in self._recorded)
        last = min((r for r in self._recorded if r.order[0] == last_request), key=lambda recorded: recorded.order)
        return (*last.history, last.message)

    def begin_request(self) -> int:
        """Number of the request that begins. Raises `ApiError` when a limit is reached."""
        if self._max_requests is not None and self._num_requests >= self._max_requests:
            raise self.refused(
                f"this session may make {self._max_requests} requests and has made them; "
                "raise environment.max_turns if the agent needs more",
                code=TOO_MANY_REQUESTS,
            )
        if len(self._recorded) >= self._max_calls and not self._forgets_oldest:
            raise self.refused(
                f"this session has recorded {len(self._recorded)} answers; fetch them and delete the session, "
                "or use a session per episode",
                code=RECORD_FULL,
            )
        self.refusal = None
        self._num_requests += 1
        return self._num_requests - 1

    def refused(self, message: str, *, code: str) -> ApiError:
        """The error that tells the client, remembered because it may be what ends the episode."""
        self.refusal = code
        return ApiError(message, param="messages", code=code)

    def failed(self, failure: LockstepError) -> None:
        if self.failure is None:
            self.failure = failure

    def record(self, recorded: Recorded, tools: Tools) -> None:
        """Keep a call. Nothing is kept after `close`: the episode has been read."""
        if self._is_closed:
            return
        if len(self._recorded) >= self._max_calls and self._forgets_oldest:
            self._forget(self._recorded.popleft(), self._keys.popleft())
        key = conversation_digest([*recorded.history, recorded.message], tools)
        self._recorded.append(recorded)
        self._keys.append(key)
        self._by_conversation.setdefault(key, []).append(recorded)
        self._by_message[_message_digest(recorded.message)] += 1
        self._by_ids[recorded.call.sampled_ids] += 1

    def find(self, conversation: Sequence[Message], tools: Tools) -> list[Recorded]:
        """Calls that answered exactly this conversation (without its last message) with its last message."""
        return self._by_conversation.get(conversation_digest(conversation, tools), [])

    def has_sampled(self, message: Message) -> bool:
        """Whether the message was sampled here, in whatever conversation."""
        return self._by_message[_message_digest(message)] > 0

    def has_sampled_ids(self, ids: Sequence[int]) -> bool:
        return self._by_ids[tuple(ids)] > 0

    def close(self) -> None:
        self._is_closed = True

    def _in_order(self) -> list[Recorded]:
        return sorted(self._recorded, key=lambda recorded: recorded.order)

    def _forget(self, recorded: Recorded, key: bytes) -> None:
        self._by_conversation[key].remove(recorded)
        if not self._by_conversation[key]:
            del self._by_conversation[key]
        self._by_message -= Counter([_message_digest(recorded.message)])
        self._by_ids -= Counter([recorded.call.sampled_ids])


def conversation_digest(conversation: Sequence[Message], tools: Tools) -> bytes:
    """Equal for conversations that say the same: content, reasoning, tool calls, names, ids of calls, and tools.

    Token ids, null fields, empty reasoning and the spacing of JSON arguments make no difference.
    """
    said = [_said(message) for message in normalize_messages(without_ids(conversation))]
    return _digest([said, [dict(tool) for tool in tools]])


def _message_digest(message: Message) -> bytes:
    return conversation_digest([message], ())


def _said(message: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in message.items() if value not in (None, "") or key in ("role", "content")}


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
