"""What every form of the engine asks of vLLM, and what it accepts as evidence of a sample.

`rollout/engine/embedded.py` talks to vLLM in this process, `rollout/server/server_engine.py` over HTTP. They differ in
how an answer arrives, not in what is asked and what is believed, so both of that is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.engine.protocol import Sampling
from rollout.errors import EngineError, EvidenceError
from rollout.records import ENGINE_FILLER_LOGPROB, EngineCall, FinishReason, SamplingSupport, VersionSpan

if TYPE_CHECKING:
    from vllm import CompletionOutput

MAX_SUPPORT = 20
"""Tokens whose logprobs vLLM returns with each sampled one, at most (its `max_logprobs`). Under a top_k within it they
are the support: what truncated sampling left out has a logprob of -inf, over HTTP the filler."""
SUPPORT_TOLERANCE = 1e-3
"""How far the probabilities of a support may be from 1 in all: above bfloat16 rounding, below a token left out."""
UNUSABLE_PREFIX = "half-loaded-"
"""Begins the version label of weights that are being replaced. It is no number, so what they sample is refused."""
MAX_VERSION_DIGITS = 18
"""Of a number that fits 64 bits."""
FIRST_LABEL = "default"
"""vLLM's label of the weights that a server loaded when it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion as vLLM gave it, before anything about it is believed.

    Candidates of all positions lie one after the other, as in vLLM's `FlatLogprobs`. A position starts with the token
    that was sampled; the most probable ones follow, it perhaps among them.
    """

    sampled_ids: Sequence[int]
    candidate_ids: Sequence[int]
    candidate_logprobs: Sequence[float]
    starts: Sequence[int]
    """Index of each position's first candidate."""
    finish_reason: str | None
    versions: Sequence[tuple[str, int, int]]
    """(label of the weights, first token, end)."""

    def __post_init__(self) -> None:
        num = len(self.candidate_ids)
        if len(self.candidate_logprobs) != num or any(not 0 <= start < num for start in self.starts):
            raise EvidenceError(
                f"an answer of {num} candidates, {len(self.candidate_logprobs)} logprobs and positions at "
                f"{list(self.starts)[:3]} ... does not fit together"
            )


def answer_of(output: CompletionOutput) -> Answer:
    """vLLM's own record of a completion, as it is in the process of the engine."""
    from vllm.logprobs import FlatLogprobs

    flat = output.logprobs
    if not isinstance(flat, FlatLogprobs):
        raise EvidenceError(f"engine: the {len(output.token_ids)} sampled tokens came without logprobs")
    return Answer(
        sampled_ids=output.token_ids,
        candidate_ids=flat.token_ids,
        candidate_logprobs=flat.logprobs,
        starts=flat.start_indices,
        finish_reason=output.finish_reason,
        versions=[(span.version, span.start, span.end) for span in output.weight_versions or ()],
    )


def check_prompt(ids: Sequence[int], *, max_model_len: int, vocab_size: int) -> int:
    """The number of tokens that may still be sampled after these ids; at least 1. Raises `EngineError`."""
    if not ids:
        raise EngineError("the prompt is empty; the engine needs at least one token to condition on")
    room = max_model_len - len(ids)
    if room < 1:
        raise EngineError(
            f"a prompt of {len(ids)} tokens leaves no room to sample in a context of {max_model_len}; "
            f"raise rollout.max_model_len or filter long prompts"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise EngineError(
            f"token id {bad} is outside the engine's vocabulary of {vocab_size}; "
            f"are the tokenizer and the model of the same checkpoint?"
        )
    return room


def sample_params(sampling: Sampling, *, room: int) -> dict[str, Any]:
    """vLLM's `SamplingParams`, in full: what is left out would come from the model's generation_config.json.

    Raises `EngineError` for truncated sampling whose support the engine would not return.
    """
    if sampling.truncates and not 1 <= sampling.top_k <= MAX_SUPPORT:
        raise EngineError(
            "under top_p or min_p alone the engine does not say which tokens it sampled from, and its logprobs are "
            f"over those, the trainer's over all; set rollout.top_k to 1 .. {MAX_SUPPORT}, or "
            "rollout.top_p=1 rollout.top_k=0 rollout.min_p=0"
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
        "logprobs": MAX_SUPPORT if sampling.truncates else 0,  # 0: of the sampled token alone
        "flat_logprobs": True,
        "detokenize": False,
    }


def score_params() -> dict[str, Any]:
    """`SamplingParams` that score the prompt at temperature 1, computed anew (no cached prefix)."""
    return {
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "skip_reading_prefix_cache": True,
    }


def engine_call(prompt_ids: Sequence[int], answer: Answer, *, with_support: bool, source: str) -> EngineCall:
    """The record of a call.

    Args:
        with_support: whether sampling was truncated, so that the candidates must be the whole support.
        source: who answered, for messages.

    Raises:
        EvidenceError: ids, logprobs, support or version spans are missing or contradict each other.
        EngineError: the weights that sampled have no version: nobody knows what they are.
    """
    sampled = tuple(answer.sampled_ids)
    if len(answer.starts) != len(sampled) or tuple(answer.candidate_ids[start] for start in answer.starts) != sampled:
        raise EvidenceError(f"{source}: the logprobs are not of the {len(sampled)} sampled tokens")
    if answer.finish_reason not in set(FinishReason):
        raise EvidenceError(f"{source}: unknown finish reason {answer.finish_reason!r}")
    if sampled and not answer.versions:
        raise EvidenceError(f"{source}: the sampled tokens carry no weight version")
    return EngineCall(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=sampled,
        sampled_logprobs=tuple(answer.candidate_logprobs[start] for start in answer.starts),
        finish_reason=FinishReason(answer.finish_reason),
        version_spans=tuple(
            VersionSpan(version=version_number(label, source=source), start=start, end=end)
            for label, start, end in answer.versions
        ),
        support=_support(answer, source) if with_support else None,
    )


def version_number(label: str, *, source: str) -> int:
    """The version behind vLLM's label. Raises `EngineError` where it is the label of weights nobody vouches for."""
    if label == FIRST_LABEL:
        return 0
    if label.isascii() and label.isdigit() and len(label) <= MAX_VERSION_DIGITS:
        return int(label)
    raise EngineError(
        f"{source}: its weights are labelled {label!r:.60}, expected a number: a weight update did not finish, so what "
        "it samples is worth nothing; end the engine, start it anew, and resume from the last checkpoint"
    )


def _support(answer: Answer, source: str) -> SamplingSupport:
    """The tokens that each sampled token was drawn from.

    Raises `EvidenceError` where the returned tokens are not all of them: ties at the k-th place are all sampled from.
    """
    supports: list[list[int]] = []
    ends = [*answer.starts[1:], len(answer.candidate_ids)]
    for start, end in zip(answer.starts, ends, strict=True):
        kept = dict(zip(answer.candidate_ids[start:end], answer.candidate_logprobs[start:end], strict=True))
        kept = {token: logprob for token, logprob in kept.items() if logprob > ENGINE_FILLER_LOGPROB}
        total = sum(math.exp(min(logprob, 1.0)) for logprob in kept.values())  # above 0 none is a logprob
        if abs(total - 1) > SUPPORT_TOLERANCE:
            raise EvidenceError(
                f"{source}: the {len(kept)} returned tokens at position {len(supports)} have a probability of "
                f"{total:.4f}, expected 1: the support of the sampled token is not complete"
            )
        supports.append(sorted(kept))
    return SamplingSupport(
        offsets=np.cumsum([0, *map(len, supports)], dtype=np.int64),
        token_ids=np.array([token for support in supports for token in support], dtype=np.int32),
    )
