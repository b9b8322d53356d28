"""The records that travel from the engine to the loss, in the order in which they are made.

    EngineCall    one request to the engine: what went in, what was sampled, and the evidence
    Rollout       one episode: its calls, messages, outcome and rewards
    TrainingRow   one sequence to train on; a rollout has one per branch of its call tree

All are frozen: a stage makes the next record, it never edits the last one. Token evidence is checked
where it enters (`EngineCall.__post_init__`), so that no later stage has to wonder.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from rollout.errors import EvidenceError

# vLLM fills positions without a logprob with this value; it must never be taken for evidence.
ENGINE_FILLER_LOGPROB = -9999.0

Message = Mapping[str, Any]
"""A chat message in the OpenAI form: role, content, and where it applies tool_calls, reasoning_content, name."""


class FinishReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    """A stop token was sampled (it is the last sampled token), or a stop string was completed."""
    LENGTH = "length"
    """`max_tokens` or the context was used up; the turn has no end-of-turn token."""
    ABORT = "abort"
    """The request was cancelled, for instance by a weight update that does not wait. Never trained."""


class RolloutStatus(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The environment said that the episode is over."""
    MAX_TURNS = "max_turns"
    """The environment would go on, the turn limit does not allow it. Trainable."""
    TRUNCATED = "truncated"
    """A turn hit its token limit and the environment ended there. Trainable, or masked by config."""
    CONTEXT_FULL = "context_full"
    """The conversation no longer fits the model. The part that was sampled is trainable."""
    FAILED = "failed"
    """Evidence or engine or environment failed. Never trained, always counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Sampled tokens `[start, end)` of a call were sampled by weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingSupport:
    """The tokens that truncated sampling (top-p, top-k, min-p) kept, per sampled token.

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
        """Position of the first of these tokens, one per support, that its support does not hold."""
        if not len(sampled_ids):
            return None
        is_it = self.token_ids == np.repeat(np.asarray(sampled_ids, dtype=np.int64), np.diff(self.offsets))
        is_held = np.logical_or.reduceat(is_it, self.offsets[:-1])
        return None if is_held.all() else int(np.argmin(is_held))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """One engine request with the evidence of what it sampled. The truth from which training rows are made.

    Raises `EvidenceError` if the evidence is incomplete (tokens.md rule 9): counts that disagree,
    ids that are no ids, logprobs that are not finite, positive or the engine's filler, version spans that do not tile
    the tokens, a sampled token outside of the support that it was sampled from.
    """

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    """log π(token) under the distribution that was sampled from, at the position of its own token."""
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...] = ()
    support: SamplingSupport | None = None

    def __post_init__(self) -> None:
        n = len(self.sampled_ids)
        if not self.prompt_ids:
            raise EvidenceError("engine call: the prompt is empty; the first token would have no context")
        if len(self.sampled_logprobs) != n:
            raise EvidenceError(f"engine call: {n} sampled tokens but {len(self.sampled_logprobs)} logprobs")
        _refuse_ids("prompt", self.prompt_ids)
        _refuse_ids("sampled", self.sampled_ids)
        for position, logprob in enumerate(self.sampled_logprobs):
            is_number = isinstance(logprob, (int, float, np.floating))  # an engine may say None
            if not is_number or not ENGINE_FILLER_LOGPROB < logprob <= 1e-4:
                raise EvidenceError(
                    f"engine call: sampled token {position} (id {self.sampled_ids[position]}) has logprob {logprob}; "
                    f"expected a finite value in ({ENGINE_FILLER_LOGPROB:g}, 0]"
                )
        end = 0
        for span in self.version_spans:
            if span.start != end or span.end < span.start:
                raise EvidenceError(f"engine call: version spans {self.version_spans} do not tile {n} tokens")
            end = span.end
        if self.version_spans and end != n:
            raise EvidenceError(f"engine call: version spans end at token {end}, but {n} tokens were sampled")
        if self.support is not None and len(self.support.offsets) != n + 1:
            raise EvidenceError(f"engine call: support for {len(self.support.offsets) - 1} tokens, {n} were sampled")
        if self.support is not None and (outside := self.support.first_without(self.sampled_ids)) is not None:
            raise EvidenceError(
                f"engine call: sampled token {outside} (id {self.sampled_ids[outside]}) is not in the support that it "
                "was sampled from"
            )

    @property
    def all_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.sampled_ids

    @property
    def oldest_version(self) -> int:
        return min((span.version for span in self.version_spans), default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode of one environment: everything that is known about it, before it becomes rows."""

    rollout_id: int
    """Unique within the optimizer step; equal on all ranks and in every partition of the work."""
    group_id: int
    """Rollouts of one prompt share it; advantages are relative to the group."""
    calls: tuple[EngineCall, ...]
    messages: tuple[Message, ...] = ()
    """What a person reads and a reward scores. Never tokenised for training."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """The data row the episode was made from."""
    status: RolloutStatus = RolloutStatus.COMPLETED
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """What the environment reports: counters such as tool_errors, and its own facts for rewards."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function by name."""
    reward: float = 0.0
    """The weighted sum that advantages are computed from."""
    error: str | None = None
    duration_s: float = 0.0

    @property
    def num_turns(self) -> int:
        return len(self.calls)

    @property
    def num_sampled(self) -> int:
        return sum(len(call.sampled_ids) for call in self.calls)

    @property
    def is_cut_off(self) -> bool:
        """Whether a token limit, not the model, ended it; the last turn of those that were allowed, for one."""
        if self.status is RolloutStatus.MAX_TURNS and self.calls:
            return self.calls[-1].finish_reason is FinishReason.LENGTH
        return self.status in (RolloutStatus.TRUNCATED, RolloutStatus.CONTEXT_FULL)

    @property
    def is_trainable(self) -> bool:
        return self.status is not RolloutStatus.FAILED and self.num_sampled > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One sequence to train on. All arrays have the length L of the row.

    `loss_mask[i]` says that token i was sampled and is trained in this row; it carries provenance, not values.
    `sampling_logprobs[i]` is the engine's logprob of token i itself (no shift between inputs and targets here).
    Untrained positions hold logprob 0, version -1 and turn -1.
    """

    ids: np.ndarray  # (L,) int64
    loss_mask: np.ndarray  # (L,) bool
    sampling_logprobs: np.ndarray  # (L,) float32
    versions: np.ndarray  # (L,) int32
    turns: np.ndarray  # (L,) int32: index of the call, in order of arrival, that sampled the token
    rollout_id: int = 0
    group_id: int = 0
    support: SamplingSupport | None = None
    """Of the trained tokens only, in their order."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("loss_mask", "sampling_logprobs", "versions", "turns")}
        if any(length != len(self.ids) for length in lengths.values()):
            raise EvidenceError(f"training row: {len(self.ids)} ids, but {lengths}")
        if len(self.ids) and self.loss_mask[0]:
            raise EvidenceError("training row: the first token is trained, but nothing predicts it")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


def _refuse_ids(name: str, ids: Sequence[int]) -> None:
    try:
        is_negative = len(ids) > 0 and min(array("q", ids)) < 0
    except (TypeError, OverflowError) as error:
        raise EvidenceError(f"engine call: a {name} id is no token id ({error})") from error
    if is_negative:
        raise EvidenceError(f"engine call: negative {name} id")


def num_trained(rows: Sequence[TrainingRow]) -> int:
    return sum(row.num_trained for row in rows)
