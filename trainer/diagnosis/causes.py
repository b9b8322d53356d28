"""From evidence to a verdict and a named cause. Pure: numbers in, a sentence out.

The cause is read off what was measured, in the order in which one kind of evidence makes the next one worthless:
wrong ids say nothing about logprobs, wrong places nothing about weights, a trainer that contradicts itself nothing
about the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from trainer.diagnosis.match import TokenMatch

WARNING_KL, CRITICAL_KL = 0.01, 0.1
"""Seed 000: below 0.01 nats is expected, above 0.1 training is broken. Measured against max(|kl_v1|, kl_v2)."""

SHIFT_RATIO = 0.5
"""Neighbouring positions must agree this much better than the right ones to speak of a shift. Measured on the demo
model: 1e-6 against 0.3; two positions chosen by chance come within a factor of 0.9."""

NOISE_RATIO = 0.25
"""Share of the mismatch's kl_v2 at which the trainer's own noise explains it. Dropout gives 1 to 2, rounding in
float32 1e-9."""

SAME_WEIGHTS_RATIO = 0.5
"""Share of the record's disagreement with the trainer above which the engine, asked again, still has it. Engines that
are behind give 1, engines that have caught up give what rounding costs."""


class Verdict(IntEnum):
    OK = 0
    WARNING = 1
    CRITICAL = 2

    def __str__(self) -> str:
        return self.name.lower()


class Cause(StrEnum):
    """What is wrong. Each value is also the name of the broken variant that shows it, where there is one."""

    RETOKENISE = "retokenise"
    """Sampled turns went through text: the ids that are trained are not the ids that were sampled."""
    MISSING_FINAL = "missing_final"
    """Sampled tokens at the end of a turn are not trained."""
    SHIFT = "shift"
    """Sampling logprobs stand one position beside their tokens."""
    DROPOUT = "dropout"
    """The trainer's forward is random: it contradicts itself on the same rows."""
    STALE_WEIGHTS = "stale_weights"
    """The engine computes with other weights than the trainer."""
    STALE_ROLLOUTS = "stale_rollouts"
    """Engine and trainer agree now, but these tokens were sampled with other weights or sampling settings."""
    UNKNOWN = "unknown"
    """Something is wrong, and nothing that is known here fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCheck:
    """The engine asked again about some rows: mean |Δ log π| over their trained tokens [nats]."""

    tokens: int
    record_vs_trainer: float
    """What was recorded when the tokens were sampled against the trainer, at the temperature of sampling."""
    engine_vs_trainer: float
    """What the engine says now against the trainer, at temperature 1."""
    engine_vs_record: float | None
    """What the engine says now against what it said then; None unless both are at temperature 1."""

    @property
    def still_disagrees(self) -> bool:
        return self.engine_vs_trainer > SAME_WEIGHTS_RATIO * self.record_vs_trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that was measured on one case."""

    match: TokenMatch
    mismatch: Mapping[str, float]
    """`statistics.mismatch`; empty without trained tokens."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """`statistics.noise_floor`."""
    abs_diff_by_offset: Mapping[int, float] = field(default_factory=dict)
    engine: EngineCheck | None = None
    """None where there is no engine (saved rollouts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    verdict: Verdict
    cause: Cause | None
    explanation: str


def level(metrics: Mapping[str, float]) -> float:
    """The number that thresholds are for: kl_v1 can cancel, kl_v2 cannot."""
    return max(abs(metrics.get("kl_v1", 0.0)), metrics.get("kl_v2", 0.0))


def verdict_of(kl: float) -> Verdict:
    if not kl <= CRITICAL_KL:  # NaN is critical
        return Verdict.CRITICAL
    return Verdict.WARNING if kl > WARNING_KL else Verdict.OK


def judge(evidence: Evidence) -> Finding:
    """The verdict by thresholds, and by the record: a row that does not agree with it exactly is critical."""
    verdict = max(verdict_of(level(evidence.mismatch)), verdict_of(level(evidence.noise)))
    if not evidence.match.is_exact:
        verdict = Verdict.CRITICAL
    if verdict is Verdict.OK:
        return Finding(verdict=verdict, cause=None, explanation="engine and trainer agree")
    cause, explanation = _cause(evidence)
    return Finding(verdict=verdict, cause=cause, explanation=explanation)


def _cause(evidence: Evidence) -> tuple[Cause, str]:
    match = evidence.match
    if match.same_id < match.trained:
        return Cause.RETOKENISE, (
            f"{match.trained - match.same_id} of {match.trained} trained ids are not the sampled ones "
            f"(id match rate {match.id_match_rate:.3f}): a sampled turn was rendered or tokenised again"
        )
    if match.trained < match.sampled:
        where = "at the end of turns" if match.lost_ends else "in whole turns"
        return Cause.MISSING_FINAL, (
            f"{match.sampled - match.trained} of {match.sampled} sampled tokens are not trained, {where}; what is "
            "trained is right, so no divergence shows it"
        )
    offset = _better_offset(evidence.abs_diff_by_offset)
    if offset is not None:
        here, there = evidence.abs_diff_by_offset[0], evidence.abs_diff_by_offset[offset]
        side = "late" if offset > 0 else "early"
        return Cause.SHIFT, (
            f"sampling logprobs fit one position {side}: mean |Δ log π| {there:.2g} there and {here:.2g} at their own "
            "position; inputs and targets are shifted against each other"
        )
    if evidence.noise.get("kl_v2", 0.0) > NOISE_RATIO * evidence.mismatch.get("kl_v2", 0.0):
        return Cause.DROPOUT, (
            f"the trainer contradicts itself: kl_v2 {evidence.noise['kl_v2']:.2g} between two passes over the same "
            f"rows, {evidence.mismatch['kl_v2']:.2g} against the engine; dropout is on, or rows of a pack see each "
            "other"
        )
    if match.same < match.trained:
        return Cause.UNKNOWN, (
            f"{match.trained - match.same} of {match.trained} trained tokens carry a logprob that the engine did not "
            "report for them"
        )
    return _which_weights(evidence.engine)


def _which_weights(engine: EngineCheck | None) -> tuple[Cause, str]:
    """Ids, places and the trainer are right, so the two sides computed with different weights. Which?"""
    if engine is None or not engine.tokens:
        return Cause.STALE_ROLLOUTS, (
            "ids and positions are right and the trainer is consistent, so these tokens were sampled with other "
            "weights or another temperature than they are scored with: set model.path to the weights that sampled "
            "them, and rollout.temperature as in their run"
        )
    if engine.still_disagrees:
        own = "" if engine.engine_vs_record is None else f", {engine.engine_vs_record:.2g} from what it recorded"
        return Cause.STALE_WEIGHTS, (
            f"asked again, the engine is {engine.engine_vs_trainer:.2g} nats a token away from the trainer{own}: it "
            "computes with other weights (a weight sync is missing) or in another precision"
        )
    return Cause.STALE_ROLLOUTS, (
        f"asked again, the engine agrees with the trainer ({engine.engine_vs_trainer:.2g} nats a token), but the "
        "recorded logprobs do not: these tokens were sampled with earlier weights or other sampling settings"
    )


def _better_offset(abs_diff_by_offset: Mapping[int, float]) -> int | None:
    """The neighbouring offset at which logprobs fit clearly better than at 0."""
    if 0 not in abs_diff_by_offset:
        return None
    best = min(abs_diff_by_offset, key=lambda offset: abs_diff_by_offset[offset])
    is_clear = abs_diff_by_offset[best] < SHIFT_RATIO * abs_diff_by_offset[0]
    return best if best != 0 and is_clear else None
