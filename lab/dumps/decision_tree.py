"""Decision tree for the distance between sampling and training logprobs: questions in the order in which a yes makes
the later ones meaningless. docs/kl.md says the same in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from lockstep.lab.dumps.measures import Measures

AGREES = 1e-6
"""kl_v2 up to which both sides agree [nats]: float32 on both leaves 1e-9, bfloat16 on one 1e-4."""
ROUNDING = 0.035
"""Mean |d| up to which bfloat16 can be the cause [nats]; it gives 0.01 to 0.03."""
ONE_SIDED = 0.7
"""Mean d over mean |d| from which the engine finds tokens more likely throughout. Two policies of the same tokens give
about half the mean |d|; a support of 20 of 512 tokens gives 1."""


class Cause(StrEnum):
    """Explanation of the distance. Values are those of the JSON."""

    INVALID = "invalid"
    NOT_SCORED = "not_scored"
    COPIED = "copied"
    WRONG_MASK = "wrong_mask"
    SHIFT = "shift"
    NONE = "none"
    RETOKENIZE = "retokenise"
    PADDING = "padding"
    SUPPORT = "truncated_support"
    UNKNOWN = "unknown"
    TEMPERATURE = "temperature"
    DTYPE = "dtype"
    STALE = "stale_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question of the tree."""

    cause: Cause
    asks: str
    answer: Callable[[Measures], str | None]
    """Returns the numbers of a yes, None for a no."""
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The questions that were questions, the last with a yes, and what the dump cannot tell."""

    cause: Cause
    questions: tuple[Question, ...]
    evidence: str
    cannot_tell: tuple[str, ...]


def judge(measures: Measures) -> Verdict:
    """Ask the questions in order up to the first yes; the last one always has one."""
    for number, question in enumerate(TREE, start=1):
        if (evidence := question.answer(measures)) is not None:
            questions = TREE[:number]
            return Verdict(
                cause=question.cause,
                questions=questions,
                evidence=evidence,
                cannot_tell=tuple(_cannot_tell(measures, question.cause)),
            )
    raise AssertionError("the last question of the tree has no answer but yes")


def _invalid(measures: Measures) -> str | None:
    high = measures.sampling_N > 1e-3, measures.training_N > 1e-3
    if any(one.any() for one in high):
        return f"{high[0].sum()} sampling and {high[1].sum()} training logprobs are above 0"
    infinite = [int(np.isinf(values).sum()) for values in (measures.sampling_N, measures.training_N)]
    return f"{infinite[0]} sampling and {infinite[1]} training logprobs are infinite" if any(infinite) else None


def _not_scored(measures: Measures) -> str | None:
    if measures.without_training:
        return f"{measures.without_training} of {measures.num_trained} trained tokens have no training logprob"
    is_zero = bool(measures.num_tokens) and not measures.training_N.any() and bool(measures.sampling_N.any())
    return f"all {measures.num_tokens} training logprobs are 0" if is_zero else None


def _copied(measures: Measures) -> str | None:
    is_copy = measures.num_tokens > 1 and not measures.d_N.any() and bool(measures.sampling_N.any())
    return f"all {measures.num_tokens} training logprobs equal the sampling logprobs bit for bit" if is_copy else None


def _wrong_mask(measures: Measures) -> str | None:
    if measures.without_sampling <= 0.002 * measures.num_trained:
        return None
    return (
        f"{measures.without_sampling} of {measures.num_trained} trained tokens have no sampling logprob: none is "
        "written, or 0 where the trainer finds them unlikely"
    )


def _shift(measures: Measures) -> str | None:
    by_offset = measures.abs_by_offset
    best = min(by_offset, key=lambda offset: by_offset[offset])
    if not best or by_offset[best] * 3 > by_offset[0]:
        return None
    where = "late" if best > 0 else "early"
    return (
        f"sampling logprobs fit one position {where}: mean |d| {by_offset[best]:.2g} there, {by_offset[0]:.2g} at "
        "their own position"
    )


def _agrees(measures: Measures) -> str | None:
    return f"kl_v2 is {measures.kl_v2:.1e} over {measures.num_tokens} tokens" if measures.kl_v2 < AGREES else None


def _retokenized(measures: Measures) -> str | None:
    far = int(measures.far_R.sum())
    onsets = [onset for onset in measures.onset_R if onset is not None]
    if not far or len(onsets) <= 0.8 * far:
        return None
    return (
        f"{len(onsets)} of {far} rows with a token above {measures.jump:.2g} nats agree up to it (mean |d| below "
        f"{measures.clean:.2g}) and not after it; the median of these places is trained token {int(np.median(onsets))}"
    )


def _padding(measures: Measures) -> str | None:
    sizes = measures.abs_of_longest_and_others
    if sizes is None or sizes[0] > 0.2 * sizes[1]:
        return None
    return f"the longest rows have a mean |d| of {sizes[0]:.2g}, all others of {sizes[1]:.2g}"


def _support(measures: Measures) -> str | None:
    ratio, error = measures.ratio
    one_sided = measures.kl_v1 / measures.abs_mean
    if one_sided < ONE_SIDED or ratio > 1 - 3 * error:
        return None
    return (
        f"the engine finds tokens more likely (d is {one_sided:.0%} of |d|), and the mean of π_training / π_sampling "
        f"is {ratio:.3f}: the engine's probabilities are of fewer tokens"
    )


def _no_pair(measures: Measures) -> str | None:
    ratio, error = measures.ratio
    if abs(ratio - 1) <= 6 * error + 0.02:
        return None
    return (
        f"the mean of π_training / π_sampling is {ratio:.3f} ± {error:.3f}, and 1 for any two policies with the same "
        "tokens to choose from, if these rows were not trained before they were scored"
    )


def _temperature(measures: Measures) -> str | None:
    spread, error, r2 = measures.spread
    if r2 < 0.9 or abs(spread - 1) <= max(0.05, 6 * error):
        return None
    return f"sampling logprobs spread {spread:.2f} times as wide as training logprobs, at r² {r2:.3f}"


def _rounding(measures: Measures) -> str | None:
    return f"mean |d| is {measures.abs_mean:.2g} nats" if measures.abs_mean < ROUNDING else None


def _stale(measures: Measures) -> str:
    return f"mean |d| is {measures.abs_mean:.2g} nats, and nothing else fits"


TREE = (
    Question(
        cause=Cause.INVALID,
        asks="Are some numbers no logprobs?",
        answer=_invalid,
        remedy="write log-probabilities (natural, at most 0) of the chosen tokens",
    ),
    Question(
        cause=Cause.NOT_SCORED,
        asks="Did the trainer not score the tokens?",
        answer=_not_scored,
        remedy="write the logprobs before the update: some trainers leave them out or set them to 0 on policy",
    ),
    Question(
        cause=Cause.COPIED,
        asks="Are the training logprobs copies of the sampling logprobs?",
        answer=_copied,
        remedy="turn off the bypass of the old policy for one step; copies say nothing about the trainer",
    ),
    Question(
        cause=Cause.WRONG_MASK,
        asks="Are tokens trained that the engine did not sample?",
        answer=_wrong_mask,
        remedy="mask answers of tools, prompts of later turns and padding; train what was sampled",
    ),
    Question(
        cause=Cause.SHIFT,
        asks="Do the logprobs fit better one position away?",
        answer=_shift,
        remedy="align inputs and targets: the logits at position i are of token i + 1",
    ),
    Question(cause=Cause.NONE, asks="Do engine and trainer agree?", answer=_agrees, remedy="nothing is to be done"),
    Question(
        cause=Cause.RETOKENIZE,
        asks="Do rows agree up to a place, and not after it?",
        answer=_retokenized,
        remedy="train the sampled ids; never decode and encode a turn, also not to build the next prompt",
    ),
    Question(
        cause=Cause.PADDING,
        asks="Do only the longest rows agree?",
        answer=_padding,
        remedy="give attention mask and position ids to the scoring pass, or pack rows without padding",
    ),
    Question(
        cause=Cause.SUPPORT,
        asks="Does the engine choose among fewer tokens than the trainer?",
        answer=_support,
        remedy="sample with top_p=1, top_k=-1, min_p=0, or normalize the trainer's logprobs over the same tokens",
    ),
    Question(
        cause=Cause.UNKNOWN,
        asks="Are the two no policies of the same tokens?",
        answer=_no_pair,
        remedy="score before the update; then look at the worst positions: penalties and processors of logits, other "
        "ids, a trainer that sees other rows",
    ),
    Question(
        cause=Cause.TEMPERATURE,
        asks="Are all logprobs stretched?",
        answer=_temperature,
        remedy="divide the trainer's logits by the temperature of sampling, or ask the engine for logprobs after it",
    ),
    Question(
        cause=Cause.DTYPE,
        asks="Is the distance that of rounding?",
        answer=_rounding,
        remedy="compare the dtypes of engine and trainer; correct what is left by importance weights",
    ),
    Question(
        cause=Cause.STALE,
        asks="Else: other weights",
        answer=_stale,
        remedy="compare the version of the engine with the trainer's; send weights after each update, all of them",
    ),
)


def _cannot_tell(measures: Measures, cause: Cause) -> Sequence[str]:
    """Return what this dump leaves open beside the cause that fits first."""
    rows = measures.dump.rows
    left: list[str] = []
    if cause in (Cause.DTYPE, Cause.STALE):
        left.append("weights that are a little old from rounding: score the ids again with model.path=<the weights>")
    if cause is Cause.RETOKENIZE and len({row.version for row in rows}) < 2:
        left.append("turns that were tokenized again from weights that changed while a row was sampled")
    if cause is Cause.UNKNOWN:
        left.append("which policy is wrong: score the ids again with model.path=<the weights>")
    if cause not in (Cause.INVALID, Cause.NOT_SCORED, Cause.COPIED, Cause.WRONG_MASK, Cause.SHIFT, Cause.NONE):
        if measures.abs_of_longest_and_others is None:
            left.append("padding: all rows are equally long")
        if all(row.temperature is None for row in rows):
            left.append("whether both sides meant the same temperature: the rows do not say it")
    if measures.num_tokens < 256:
        left.append(f"much: there are {measures.num_tokens} trained tokens; take some 1,000")
    if cause is not Cause.NONE:
        left.append("whether a second cause hides behind this one: mend it, and look again")
    return left
