"""Requests to vLLM and validation of its answers, shared by all engines.

Engines differ in transport only; sampling parameters and the evidence they accept are defined here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.rollout.engine.protocol import MAX_SUPPORT, Sampling
from lockstep.rollout.errors import EngineError, EvidenceError
from lockstep.rollout.records import (
    ENGINE_FILLER_LOGPROB,
    EngineCall,
    FinishReason,
    ImageSpan,
    Routes,
    SamplingSupport,
    VersionSpan,
)

if TYPE_CHECKING:
    from vllm import CompletionOutput

SUPPORT_TOLERANCE = 1e-3
"""Allowed distance from 1 of a support's total probability: above bfloat16 rounding, below a missing token."""
UNUSABLE_PREFIX = "half-loaded-"
"""Prefix of the version label during a weight update. Such a label is not a number, so its tokens are refused."""
MAX_VERSION_DIGITS = 18
"""Digits that fit 64 bits."""
FIRST_LABEL = "default"
"""vLLM's label for the weights loaded at start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion as returned by vLLM, not yet validated.

    Candidates of all positions are concatenated, as in vLLM's `FlatLogprobs`. Each position starts with the sampled
    token, followed by the most probable ones, which may include it.
    """

    sampled_ids: Sequence[int]
    candidate_ids: Sequence[int]
    candidate_logprobs: Sequence[float]
    starts: Sequence[int]
    """Index of each position's first candidate."""
    finish_reason: str | None
    versions: Sequence[tuple[str, int, int]]
    """(weight label, first token, end)."""
    routes: np.ndarray | None = None
    """(tokens, layers, k) experts of all tokens but the last; None: the engine returns none."""

    def __post_init__(self) -> None:
        num = len(self.candidate_ids)
        if len(self.candidate_logprobs) != num or any(not 0 <= start < num for start in self.starts):
            raise EvidenceError(
                f"inconsistent answer: {num} candidates, {len(self.candidate_logprobs)} logprobs, positions at "
                f"{list(self.starts)[:3]} ..."
            )


def integer(value: Any) -> int:
    """Return an integer of a JSON answer. Raises TypeError for anything else, such as text and bools."""
    if isinstance(value, bool):
        raise TypeError(f"{value} is a bool, expected an integer")
    return index(value)


def number(value: Any) -> float:
    """Return a number of a JSON answer. Raises TypeError for anything else, such as text and bools."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.40} is not a number")
    return float(value)


def answer_of(output: CompletionOutput) -> Answer:
    """Convert vLLM's completion record, inside the engine's process. Raises `EvidenceError` without logprobs."""
    from vllm.logprobs import FlatLogprobs

    flat = output.logprobs
    if not isinstance(flat, FlatLogprobs):
        raise EvidenceError(f"engine: no logprobs for the {len(output.token_ids)} sampled tokens")
    return Answer(
        sampled_ids=output.token_ids,
        candidate_ids=flat.token_ids,
        candidate_logprobs=flat.logprobs,
        starts=flat.start_indices,
        finish_reason=output.finish_reason,
        versions=[(span.version, span.start, span.end) for span in output.weight_versions or ()],
        routes=output.routed_experts,
    )


def check_prompt(ids: Sequence[int], *, max_model_len: int, vocab_size: int) -> int:
    """Return the number of tokens that may be sampled after these ids, at least 1. Raises `EngineError`."""
    if not ids:
        raise EngineError("the prompt is empty, expected at least one token")
    room = max_model_len - len(ids)
    if room < 1:
        raise EngineError(
            f"a prompt of {len(ids)} tokens leaves no room to sample in a context of {max_model_len}; "
            "raise rollout.max_model_len or filter long prompts"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise EngineError(
            f"token id {bad} is outside the engine's vocabulary of {vocab_size}; use the tokenizer of the model's own "
            "checkpoint (model.path)"
        )
    return room


def refuse_images(images: Sequence[ImageSpan], *, source: str) -> None:
    """Raise `EngineError` for a request with images to an engine that does not carry them."""
    if images:
        raise EngineError(f"{source} does not take images; set model.images.max_per_prompt")


def sample_params(sampling: Sampling, *, room: int) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams`, in full (see `Sampling`).

    Raises `EngineError` for truncated sampling whose support vLLM would not return.
    """
    if sampling.truncates and not 1 <= sampling.top_k <= MAX_SUPPORT:
        raise EngineError(
            f"found rollout.top_k={sampling.top_k} with truncated sampling, whose support the engine returns only for "
            f"a top_k of 1 .. {MAX_SUPPORT}, and the trainer cannot normalize without it; set rollout.top_k="
            f"{MAX_SUPPORT}, or rollout.top_p=1 rollout.top_k=0 rollout.min_p=0"
        )
    return {
        "n": 1,
        "max_tokens": min(sampling.max_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "logprobs": MAX_SUPPORT if sampling.truncates else 0,  # 0: the sampled token only
        "flat_logprobs": True,
        "detokenize": False,
        **({"extra_args": {"drawn": sampling.drawn}} if sampling.drawn else {}),
    }


def score_params(top_k: int = 0) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that score the prompt, without cached prefixes.

    vLLM scores prompts at temperature 1, whatever the temperature of sampling. top_k: number of most probable tokens at
    each position.
    """
    return {
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": top_k,
        "flat_logprobs": True,
        "detokenize": False,
        "skip_reading_prefix_cache": True,
    }


def engine_call(
    prompt_ids: Sequence[int],
    answer: Answer,
    *,
    images: Sequence[ImageSpan] = (),
    with_support: bool,
    with_routes: bool = False,
    max_tokens: int,
    vocab_size: int,
    source: str,
) -> EngineCall:
    """Validate an answer and return the record of the call.

    Raises `EvidenceError` if ids, logprobs, support, routes or version spans are missing or inconsistent, `EngineError`
    if the sampling weights have no valid version.

    Args:
        images: those of the prompt.
        with_support: True if sampling was truncated, so the candidates must be the whole support.
        with_routes: `Sampling.needs_routes`; other routes are dropped.
        max_tokens: number of tokens that were requested.
        vocab_size: number of rows of the trainer's embedding.
        source: name of the engine, for messages.
    """
    sampled_ids = tuple(answer.sampled_ids)
    if len(sampled_ids) > max_tokens:
        raise EvidenceError(f"{source}: {len(sampled_ids)} sampled tokens, {max_tokens} were requested")
    ids = answer.candidate_ids
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        raise EvidenceError(f"{source}: token id {outside} is outside the vocabulary of {vocab_size}")
    if (
        len(answer.starts) != len(sampled_ids)
        or tuple(answer.candidate_ids[start] for start in answer.starts) != sampled_ids
    ):
        raise EvidenceError(f"{source}: the logprobs do not belong to the {len(sampled_ids)} sampled tokens")
    if answer.finish_reason not in set(FinishReason):
        raise EvidenceError(f"{source}: unknown finish reason {answer.finish_reason!r}")
    if sampled_ids and not answer.versions:
        raise EvidenceError(f"{source}: the sampled tokens have no weight version")
    if with_routes and answer.routes is None:
        raise EvidenceError(
            f"{source} returns no routed experts; start it with --enable-return-routed-experts, or set "
            "correction.routing_replay=off"
        )
    return EngineCall(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=sampled_ids,
        sampled_logprobs=tuple(answer.candidate_logprobs[start] for start in answer.starts),
        finish_reason=FinishReason(answer.finish_reason),
        version_spans=tuple(
            VersionSpan(version=version_number(label, source=source), start=start, end=end)
            for label, start, end in answer.versions
        ),
        support=_support(answer, source) if with_support else None,
        routes=Routes(own=answer.routes) if with_routes and answer.routes is not None else None,
        images=tuple(images),
    )


def version_number(label: str, *, source: str) -> int:
    """Return the version in vLLM's label. Raises `EngineError` for a label that is not a number."""
    if label == FIRST_LABEL:
        return 0
    if label.isascii() and label.isdigit() and len(label) <= MAX_VERSION_DIGITS:
        return int(label)
    raise EngineError(
        f"{source}: its weights are labeled {label!r:.60}, expected a number: a weight update did not finish, so its "
        "samples cannot be used; restart the engine and resume from the last checkpoint"
    )


def single_version(labels: Sequence[str], source: str) -> int:
    """Return the version of a request whose tokens have one. Raises `EvidenceError` for none or several."""
    if len(set(labels)) != 1:
        raise EvidenceError(f"{source}: the scores have weight versions {sorted(set(labels))}, expected one")
    return version_number(labels[0], source=source)


def _support(answer: Answer, source: str) -> SamplingSupport:
    """Return the support of each sampled token.

    Raises `EvidenceError` if returned tokens are missing: vLLM samples from all ties at rank k, but returns k tokens.
    """
    supports: list[list[int]] = []
    ends = [*answer.starts[1:], len(answer.candidate_ids)]
    for start, end in zip(answer.starts, ends, strict=True):
        scores = dict(zip(answer.candidate_ids[start:end], answer.candidate_logprobs[start:end], strict=True))
        scores = {token: logprob for token, logprob in scores.items() if logprob > ENGINE_FILLER_LOGPROB}
        total = sum(math.exp(min(logprob, 1.0)) for logprob in scores.values())  # bounded: an invalid one may overflow
        if abs(total - 1) > SUPPORT_TOLERANCE:
            raise EvidenceError(
                f"{source}: the {len(scores)} returned tokens at position {len(supports)} have a probability of "
                f"{total:.4f}, expected 1: the support of the sampled token is incomplete"
            )
        supports.append(sorted(scores))
    return SamplingSupport(
        offsets=np.cumsum([0, *map(len, supports)], dtype=np.int64),
        token_ids=np.array([token for support in supports for token in support], dtype=np.int32),
    )
