"""Records passed from the engine to the loss, in order of creation.

    EngineCall    one engine request: prompt, sampled tokens and their evidence
    Rollout       one episode: calls, messages, outcome and rewards
    TrainingRow   one training sequence; a rollout has one per branch of its call tree

All are frozen. `EngineCall` validates token evidence once, for all later stages.

Most prompts of a rollout extend an earlier call. A rollout stores for each of them that call and the rest of the prompt
(`PromptSharing`), so that its memory grows with its tokens, not with its turns times its tokens.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain
from typing import Any

import numpy as np

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.safe_text import safe_text

# vLLM's value for positions without a logprob; never evidence.
ENGINE_FILLER_LOGPROB = -9999.0
IMAGE_DIGEST = re.compile("[0-9a-f]{64}")
"""SHA-256 as it is written."""

Message = Mapping[str, Any]
"""Chat message in the OpenAI format: role, content, and optionally tool_calls, reasoning_content, name."""


def content_text(message: Message, mark: Callable[[Any], str] = lambda part: f"[{part.get('type')}]") -> str:
    """Return the text of a message, joining its parts. mark: writes a part without text, such as an image."""
    content = message.get("content") or ""
    if isinstance(content, list | tuple):
        return " ".join(str(part.get("text") or mark(part)) for part in content)
    return str(content)


def image_parts(message: Message) -> list[Mapping[str, Any]]:
    """Return the parts of a message that are images, or places for them."""
    content = message.get("content")
    return [part for part in content if is_image_part(part)] if isinstance(content, list | tuple) else []


def is_image_part(part: Any) -> bool:
    """True for a part of a message that is an image, in any form."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def is_stored_image(part: Any) -> bool:
    """True for the part of a message that is an image of the run, named by its digest."""
    return isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("digest"), str)


class DataRow(dict[str, Any]):
    """Row of a data set."""

    place: str = ""
    """Number of the row and its data set, for errors."""


def at_row(text: str, row: Mapping[str, Any]) -> str:
    """Return the text with the place of the row, unless it names it."""
    place = row.place if isinstance(row, DataRow) else ""
    return text if place in text else f"{text} ({place})"


class FinishReason(StrEnum):
    """Reason the engine stopped sampling."""

    STOP = "stop"
    """A stop token was sampled (the last sampled token), or a stop string was completed."""
    LENGTH = "length"
    """`max_tokens` or the context is exhausted; the turn has no end-of-turn token."""
    ABORT = "abort"
    """The request was canceled, for instance by a weight update that does not wait. Never trained."""


class RolloutStatus(StrEnum):
    """End state of an episode."""

    COMPLETED = "completed"
    """The environment ended the episode."""
    MAX_TURNS = "max_turns"
    """The turn limit ended the episode. Trainable."""
    TRUNCATED = "truncated"
    """A turn reached its token limit and the environment ended there. Trainable, or masked by config."""
    CONTEXT_FULL = "context_full"
    """The conversation no longer fits the context. Tokens sampled before are trainable."""
    FAILED = "failed"
    """Evidence, engine or environment failed. Never trained, always counted."""


class Cause(StrEnum):
    """Cause for which a rollout is not trained."""

    REWARD = "reward"
    """A reward function failed."""
    UNSCORED = "unscored"
    """No reward function applies to it."""
    BASELINE = "baseline"
    """The greedy answer to its prompt failed."""
    ENVIRONMENT = "environment"
    """The environment, its tools, or the agent failed."""
    TEMPLATE = "template"
    """The chat template refused the conversation."""
    ENGINE = "engine"
    """The engine failed, for it or another rollout of its group, or gave evidence that cannot be trusted."""
    PROMPT = "prompt"
    """Nothing was sampled: the prompt fills the context."""


CAUSES = {
    "TemplateError": Cause.TEMPLATE,
    **dict.fromkeys(("EvidenceError", "EngineError", "RequestError"), Cause.ENGINE),
}
"""Cause by the class of the error, with whose name the sentence begins; others are of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Weight version that sampled tokens `[start, end)` of a call."""

    version: int
    start: int
    end: int

    @property
    def values(self) -> tuple[int, int, int]:
        return self.version, self.start, self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Image of a prompt: the token ids `[start, end)` stand for it, and none of them is ever trained."""

    start: int
    end: int
    digest: str
    """SHA-256 of the image, by which its pixels are found (`rollout/media/`)."""

    def shifted(self, by: int) -> ImageSpan:
        return replace(self, start=self.start + by, end=self.end + by)


class PromptIds(list[int]):
    """Token ids of a prompt, with its images. A list of the same ids is equal only to one without images."""

    def __init__(self, ids: Iterable[int] = (), images: Iterable[ImageSpan] = ()) -> None:
        super().__init__(ids)
        self.images = tuple(images)
        """In the order of their ids."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and list.__eq__(self, other) and self.images == getattr(other, "images", ())

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def ids_with_images(ids: tuple[int, ...], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """Return the ids with the first one of each image replaced by a negative number of its digest.

    Two prompts are equal, or begin alike, where these are: the ids of two images may be the same.
    """
    if not images:
        return ids
    marked = list(ids)
    for image in images:
        marked[image.start] = -1 - (int(image.digest[:16], 16) >> 1)
    return tuple(marked)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingSupport:
    """Tokens kept by truncated sampling (top-p, top-k, min-p), per sampled token.

    Token t of the call was drawn from `token_ids[offsets[t]:offsets[t + 1]]`.
    """

    offsets: np.ndarray  # (T + 1,) int64
    token_ids: np.ndarray  # (sum of support sizes,) int32

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or not len(self.offsets):
            raise EvidenceError(f"sampling support: offsets of shape {self.offsets.shape}, expected (tokens + 1,)")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.token_ids):
            raise EvidenceError(
                f"sampling support: offsets must run from 0 to {len(self.token_ids)} (its number of token ids), "
                f"found {self.offsets[:1].tolist()} to {self.offsets[-1:].tolist()}"
            )
        if (np.diff(self.offsets) < 1).any():
            raise EvidenceError("sampling support: a sampled token has an empty support")

    def first_without(self, sampled_ids: Sequence[int]) -> int | None:
        """Return the position of the first sampled token missing from its support, or None."""
        if not len(sampled_ids):
            return None
        is_equal = self.token_ids == np.repeat(np.asarray(sampled_ids, dtype=np.int64), np.diff(self.offsets))
        is_in = np.logical_or.reduceat(is_equal, self.offsets[:-1])
        return None if is_in.all() else int(np.argmin(is_in))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Experts of a mixture of experts that the engine chose for each token: those of an earlier call, then its own."""

    own: np.ndarray
    """(tokens, layers, k) unsigned integers; dense layers hold anything."""
    base: Routes | None = None
    num_shared: int = 0
    """Number of tokens taken from `base`."""

    def __post_init__(self) -> None:
        if self.own.ndim != 3 or self.own.dtype.kind != "u":
            raise EvidenceError(
                f"routed experts: {self.own.dtype} of shape {self.own.shape}, expected unsigned integers of shape "
                "(tokens, layers, experts per token)"
            )
        limit = 0 if self.base is None else len(self.base)
        if not 0 <= self.num_shared <= limit:
            raise EvidenceError(f"routed experts: {self.num_shared} tokens of a call that has {limit}")
        if self.base is not None and (self.base.own.shape[1:], self.base.own.dtype) != (self.shape, self.own.dtype):
            raise EvidenceError(f"routed experts: {self.shape} and {self.base.shape} per token in calls of one rollout")

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, k)."""
        return self.own.shape[1], self.own.shape[2]

    @property
    def whole(self) -> np.ndarray:
        """(tokens, layers, k) experts of all tokens."""
        parts, routes, end = [self.own], self.base, self.num_shared
        while routes is not None:  # without recursion, as in `Prompt.ids`
            parts.append(routes.own[: max(0, end - routes.num_shared)])
            routes, end = routes.base, min(end, routes.num_shared)
        return np.concatenate(parts[::-1])

    def first(self, length: int) -> Routes:
        """Return those of the first tokens."""
        return Routes(own=self.whole[:length])

    def since(self, start: int) -> np.ndarray:
        """Return the experts of the tokens from `start` on."""
        return self.own[start - self.num_shared :] if start >= self.num_shared else self.whole[start:]

    def after(self, base: Routes | None, num_shared: int) -> Routes:
        """Return equal routes that take those of the first tokens from an earlier call, as far as they are equal.

        A token that was computed again, because it had left the prefix cache, may have had other experts.
        """
        if base is None or base.shape != self.shape or base.own.dtype != self.own.dtype:
            return self
        whole, limit = self.whole, min(num_shared, len(base), len(self))
        differs = (whole[:limit] != base.whole[:limit]).any((1, 2))
        num_shared = int(differs.argmax()) if differs.any() else limit
        return Routes(own=whole[num_shared:].copy(), base=base, num_shared=num_shared)

    def __len__(self) -> int:
        return self.num_shared + len(self.own)

    def __reduce__(self) -> tuple[Any, ...]:
        return _whole_routes, (self.whole,)  # copies without the calls they build on


def _whole_routes(own: np.ndarray) -> Routes:
    return Routes(own=own)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Prompt:
    """Token ids of a prompt: the first ids of an earlier call, then its own. Equal to another one with equal ids."""

    own_ids: tuple[int, ...]
    base: EngineCall | None = None
    num_shared: int = 0
    """Number of ids taken from the prompt and the sampled tokens of `base`."""

    def __post_init__(self) -> None:
        limit = 0 if self.base is None else len(self.base.prompt) + len(self.base.sampled_ids)
        if not 0 <= self.num_shared <= limit:
            raise EvidenceError(f"engine call: a prompt shares {self.num_shared} ids with a call that has {limit}")

    @property
    def ids(self) -> tuple[int, ...]:
        if self.base is None:
            return self.own_ids
        parts = [self.own_ids]
        base, end = self.base, self.num_shared
        while base is not None:  # without recursion: a rollout may have thousands of turns
            prompt = base.prompt
            parts.append(base.sampled_ids[: max(0, end - len(prompt))])
            parts.append(prompt.own_ids[: max(0, end - prompt.num_shared)])
            base, end = prompt.base, min(end, prompt.num_shared)
        return tuple(chain.from_iterable(reversed(parts)))

    def __len__(self) -> int:
        return self.num_shared + len(self.own_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prompt) and len(self) == len(other) and self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids)

    def __repr__(self) -> str:
        return repr(self.ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return _whole_prompt, (self.ids,)  # copies without the calls it builds on


def _whole_prompt(ids: tuple[int, ...]) -> Prompt:
    return Prompt(own_ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class EngineCall:
    """One engine request with its token evidence, from which training rows are built.

    Raises `EvidenceError` for counts that disagree, ids that are not non-negative integers, logprobs that are no
    numbers, non-finite, positive or the engine's filler, version spans that do not tile the tokens, a sampled token
    outside its support, routes of another number of tokens, and images that are not one after the other inside the
    prompt. Nothing is converted: the text "-0.5" and False are not logprobs.
    """

    prompt: Prompt
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    """log π(token) under the sampling distribution, at the position of the token itself."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...] = ()
    support: SamplingSupport | None = None
    routes: Routes | None = None
    """Experts of all tokens but the last sampled one, which the engine did not compute. None: not asked for."""
    images: tuple[ImageSpan, ...] = ()
    """Images of the prompt, in the order of their ids."""

    def __init__(
        self,
        *,
        sampled_ids: tuple[int, ...],
        sampled_logprobs: tuple[float, ...],
        finish_reason: FinishReason,
        prompt_ids: tuple[int, ...] | None = None,
        version_spans: tuple[VersionSpan, ...] = (),
        support: SamplingSupport | None = None,
        routes: Routes | None = None,
        images: tuple[ImageSpan, ...] = (),
        prompt: Prompt | None = None,
    ) -> None:
        """Give the prompt as `prompt_ids`, or as a `prompt` that shares ids with an earlier call."""
        if prompt_ids is not None or prompt is None:
            prompt = Prompt(own_ids=prompt_ids or ())
        values = (prompt, sampled_ids, sampled_logprobs, finish_reason, version_spans, support, routes, images)
        for entry, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, entry.name, value)
        self._check()

    def _check(self) -> None:
        n = len(self.sampled_ids)
        if not len(self.prompt):
            raise EvidenceError("engine call: the prompt is empty, expected at least one token")
        if len(self.sampled_logprobs) != n:
            raise EvidenceError(f"engine call: {n} sampled tokens but {len(self.sampled_logprobs)} logprobs")
        token_ids("prompt", self.prompt.own_ids)
        token_ids("sampled", self.sampled_ids)
        for position, logprob in enumerate(self.sampled_logprobs):
            # Engines may send None; a bool is an int in Python.
            is_number = isinstance(logprob, (int, float, np.floating)) and not isinstance(logprob, bool)
            if not is_number or not ENGINE_FILLER_LOGPROB < logprob <= 1e-4:
                raise EvidenceError(
                    f"engine call: sampled token {position} (id {self.sampled_ids[position]}) has logprob {logprob}; "
                    f"expected a finite value in ({ENGINE_FILLER_LOGPROB:g}, 0]"
                )
        end = 0
        for span in self.version_spans:
            is_integer = all(type(value) is int or isinstance(value, np.integer) for value in span.values)
            if not is_integer or not -1 <= span.version < 2**31:
                raise EvidenceError(f"engine call: version and limits of {span!r:.200} are not 32-bit integers")
            if span.start != end or span.end < span.start:
                raise EvidenceError(f"engine call: version spans {self.version_spans} do not tile {n} tokens")
            end = span.end
        if self.version_spans and end != n:
            raise EvidenceError(f"engine call: version spans end at token {end}, but {n} tokens were sampled")
        if self.support is not None and len(self.support.offsets) != n + 1:
            raise EvidenceError(f"engine call: support for {len(self.support.offsets) - 1} tokens, {n} were sampled")
        if self.support is not None and (outside := self.support.first_without(self.sampled_ids)) is not None:
            raise EvidenceError(
                f"engine call: sampled token {outside} (id {self.sampled_ids[outside]}) is not in its support"
            )
        if self.routes is not None and len(self.routes) != len(self.prompt) + n - 1:
            raise EvidenceError(
                f"engine call: routed experts of {len(self.routes)} tokens, expected {len(self.prompt) + n - 1}: those "
                "of the prompt and of all sampled tokens but the last"
            )
        end = 0
        for image in self.images:
            if not (type(image.start) is type(image.end) is int and end <= image.start < image.end):
                raise EvidenceError(f"engine call: images {self.images!r:.200} do not follow each other in the prompt")
            if not isinstance(image.digest, str) or not IMAGE_DIGEST.fullmatch(image.digest):
                raise EvidenceError(f"engine call: the image at {image.start} has no SHA-256, but {image.digest!r:.80}")
            end = image.end
        if end > len(self.prompt):
            raise EvidenceError(f"engine call: an image ends at token {end} of a prompt of {len(self.prompt)}")

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.prompt.ids

    @property
    def all_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.sampled_ids

    @property
    def state(self) -> tuple[int, ...]:
        """The prompt as `ids_with_images`: equal for equal prompts only."""
        return ids_with_images(self.prompt_ids, self.images)

    @property
    def oldest_version(self) -> int:
        return min((span.version for span in self.version_spans), default=-1)


MAX_TIPS = 16
"""Conversations of a rollout that are searched for the beginning of a prompt."""


class PromptSharing:
    """Calls of one rollout, in order of arrival, that store the beginning of a prompt once."""

    def __init__(self) -> None:
        self._tips: list[tuple[EngineCall, tuple[int, ...]]] = []
        """Last calls of the latest conversations with all their ids (`ids_with_images`), the latest at the end."""

    def add(self, call: EngineCall) -> EngineCall:
        """Return an equal call whose prompt builds on the call with which it shares most ids."""
        ids, path = call.prompt_ids, call.state
        tip, num_shared = self._longest_prefix(path)
        if tip is not None:
            base = self._tips[tip][0]
            prompt = Prompt(own_ids=ids[num_shared:], base=base, num_shared=num_shared)
            routes = None if call.routes is None else call.routes.after(base.routes, num_shared)
            call = replace(call, prompt=prompt, routes=routes)
            if num_shared == len(base.prompt) + len(base.sampled_ids):
                del self._tips[tip]  # its ids are part of the new tip
        self._tips = [*self._tips[-MAX_TIPS + 1 :], (call, path + call.sampled_ids)]
        return call

    def _longest_prefix(self, ids: tuple[int, ...]) -> tuple[int | None, int]:
        """Return the tip that shares most ids with the beginning of these, and their number."""
        tip, longest = None, 0
        for index in range(len(self._tips) - 1, -1, -1):
            path = self._tips[index][1]
            if len(path) > longest and path[:longest] == ids[:longest]:
                length = _common_length(path, ids)
                if length > longest:
                    tip, longest = index, length
        return tip, longest


def _common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return the number of equal elements at the beginning."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode of one environment, before it becomes rows."""

    rollout_id: int
    """Unique within the step; equal on all ranks."""
    group_id: int
    """Shared by the rollouts of one prompt; advantages are relative to the group."""
    calls: tuple[EngineCall, ...]
    messages: tuple[Message, ...] = ()
    """Conversation for display and rewards. Never tokenized for training."""
    call_messages: tuple[int | None, ...] | None = None
    """For each call, the index in `messages` of the turn that it sampled; None: it is in no message, as those of
    sub-agents. None for all: not recorded, as in files of earlier versions; `places` infers it."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Data row of the episode."""
    status: RolloutStatus = RolloutStatus.COMPLETED
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Report of the environment: counters such as tool_errors, and facts for rewards."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function, by name."""
    reward: float = 0.0
    """Weighted sum, from which advantages are computed."""
    turn_rewards: tuple[float, ...] = ()
    """Weighted sum over the reward functions that gave one number per turn, by turn; empty: none did."""
    logged: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Columns that reward functions log, by name of the function (`log_extra` of TRL)."""
    error: str | None = None
    """Reason of a failure, as safe text (`rollout/safe_text.py`), with the place of the data row."""
    cause: Cause | None = None
    """Cause of a failure; None: that of `CAUSES`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        calls = self.calls
        # Calls of a subclass were shared before (`PreparedCalls`).
        if type(calls) in (tuple, list) and len(calls) > 1 and all(call.prompt.base is None for call in calls):
            object.__setattr__(self, "calls", tuple(map(PromptSharing().add, calls)))
        if self.error is not None:
            object.__setattr__(self, "error", safe_text(at_row(self.error, self.example)))

    @property
    def num_turns(self) -> int:
        return len(self.calls)

    @property
    def num_sampled(self) -> int:
        return sum(len(call.sampled_ids) for call in self.calls)

    @property
    def sampled_at(self) -> tuple[int, ...]:
        """Indices in `messages` of the turns that the model sampled, in order."""
        if self.calls or self.call_messages is not None or self.status is not RolloutStatus.COMPLETED:
            return tuple(sorted(index for index in self.places if index is not None))
        # No episode completes without a call: a conversation written by hand, with its answers after the last user.
        roles = [message["role"] for message in self.messages]
        start = max((index for index, role in enumerate(roles) if role == "user"), default=-1)
        return tuple(index for index, role in enumerate(roles) if index > start and role == "assistant")

    @property
    def places(self) -> tuple[int | None, ...]:
        """`call_messages`. Without it, the calls of the first conversation have the last assistant turns, in order.

        Calls of sub-agents are others: their prompts do not begin with most of the first one.
        """
        if self.call_messages is not None:
            return self.call_messages
        shared: dict[int, int] = {}
        for call in self.calls:
            most = min(call.prompt.num_shared, shared.get(id(call.prompt.base), 0))
            shared[id(call)] = most if shared else len(call.prompt)
        own = [
            index
            for index, call in enumerate(self.calls)
            if 2 * shared[id(call)] >= len(self.calls[0].prompt) and call.finish_reason is not FinishReason.ABORT
        ]
        turn_places = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        message_of_call = dict(zip(reversed(own), reversed(turn_places), strict=False))
        return tuple(message_of_call.get(index) for index in range(len(self.calls)))

    @property
    def sampled_turns(self) -> tuple[Message, ...]:
        return tuple(self.messages[index] for index in self.sampled_at)

    @property
    def answer(self) -> str:
        """Text of the last sampled turn, without surrounding space; empty without one, and if it only calls tools."""
        return content_text(self.messages[self.sampled_at[-1]]).strip() if self.sampled_at else ""

    @property
    def num_prompt_messages(self) -> int:
        """Number of messages before the first that the model sampled. Assistant turns of the prompt are among them."""
        return self.sampled_at[0] if self.sampled_at else len(self.messages)

    @property
    def num_example_messages(self) -> int:
        """Number of messages up to the last turn of an assistant or a tool in the prompt: worked examples."""
        indices = [index for index, message in enumerate(self.prompt) if message["role"] in ("assistant", "tool")]
        return indices[-1] + 1 if indices else 0

    @property
    def prompt(self) -> tuple[Message, ...]:
        """Messages before the first that the model sampled."""
        return self.messages[: self.num_prompt_messages]

    @property
    def completion(self) -> tuple[Message, ...]:
        """Messages from the first that the model sampled on: its turns, and what the environment said between them."""
        return self.messages[self.num_prompt_messages :]

    @property
    def is_cut_off(self) -> bool:
        """True if a token limit, not the model, ended the rollout, also in its last allowed turn."""
        if self.status is RolloutStatus.MAX_TURNS and self.calls:
            return self.calls[-1].finish_reason is FinishReason.LENGTH
        return self.status in (RolloutStatus.TRUNCATED, RolloutStatus.CONTEXT_FULL)

    @property
    def is_trainable(self) -> bool:
        return self.dropped_by is None

    @property
    def dropped_by(self) -> Cause | None:
        """Cause for which it cannot be trained; None: it can."""
        if self.status is RolloutStatus.FAILED:
            return self.cause or CAUSES.get((self.error or "").partition(":")[0], Cause.ENVIRONMENT)
        return None if self.num_sampled else Cause.PROMPT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One training sequence. All arrays have the length L of the row.

    `loss_mask[i]` is True if token i was sampled and is trained in this row.
    `sampling_logprobs[i]` is the engine's logprob of token i itself (inputs and targets are not shifted here).
    Untrained positions hold logprob 0, version -1 and turn -1.
    """

    ids: np.ndarray  # (L,) int64
    loss_mask: np.ndarray  # (L,) bool
    sampling_logprobs: np.ndarray  # (L,) float32
    versions: np.ndarray  # (L,) int32
    turns: np.ndarray  # (L,) int32: index of the call that sampled the token, in order of arrival
    rollout_id: int = 0
    group_id: int = 0
    support: SamplingSupport | None = None
    """Support of the trained tokens only, in order."""
    routes: np.ndarray | None = None
    """(at most L, layers, k) unsigned experts of the first tokens of the row; later tokens have none."""
    images: tuple[ImageSpan, ...] = ()
    """Images of the row, in the order of their tokens."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("loss_mask", "sampling_logprobs", "versions", "turns")}
        if any(length != len(self.ids) for length in lengths.values()):
            raise EvidenceError(f"training row: {len(self.ids)} ids, but {lengths}")
        if len(self.ids) and self.loss_mask[0]:
            raise EvidenceError("training row: the first token is marked as trained, but has no context to predict it")
        if self.routes is not None and len(self.routes) > len(self.ids):
            raise EvidenceError(f"training row: {len(self.ids)} ids, but routed experts of {len(self.routes)} tokens")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


def token_ids(name: str, ids: Sequence[int]) -> array[int]:
    """Return ids as an array of 64-bit integers. Raises `EvidenceError` unless all are non-negative integers."""
    try:
        if bool in set(map(type, ids)):  # a bool counts as an integer in Python
            raise TypeError(f"{next(token for token in ids if isinstance(token, bool))} is a bool")
        array_of_ids = array("q", ids)
    except (TypeError, OverflowError) as error:
        raise EvidenceError(f"engine call: a {name} id is not a token id ({error})") from error
    if array_of_ids and np.frombuffer(array_of_ids, dtype=np.int64).min() < 0:
        raise EvidenceError(f"engine call: negative {name} id")
    return array_of_ids
