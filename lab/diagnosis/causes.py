"""Severity and named cause of a disagreement, judged from its evidence. Without torch, for a fast command line.

The rules run in the order in which one kind of evidence invalidates the next: wrong ids make logprobs meaningless,
wrong positions and a trainer that contradicts itself make conclusions about weights meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.lab.diagnosis.evidence import EngineCheck, Evidence

WARNING_KL, CRITICAL_KL = 0.01, 0.1
"""Bounds on max(|kl_v1|, kl_v2) [nats]: up to 0.01 is expected, above 0.1 training is broken ("KL Divergence Analysis",
jphme, gist, 2026)."""

SHIFT_RATIO = 0.5
"""Ratio of mean |Δ log π| at a neighboring offset to that at offset 0 below which logprobs are shifted. On the demo
model a shift gives 1e-6 / 0.3; unrelated positions give about 0.9."""

NOISE_RATIO = 0.25
"""Share of the mismatch's kl_v2 above which the trainer's own noise explains it. Dropout gives 1 to 2, float32 rounding
1e-9."""

SAME_WEIGHTS_RATIO = 0.5
"""Share of the recorded disagreement above which a second answer of the engine still disagrees. Engines with other
weights give 1; engines with the trainer's weights give rounding error."""


class Severity(IntEnum):
    """Verdict on a case or a diagnosis."""

    OK = 0
    WARNING = 1
    CRITICAL = 2

    def __str__(self) -> str:
        return self.name.lower()


class Cause(StrEnum):
    """Named cause, in the order of precedence. The values are part of the JSON format and of the command line."""

    RETOKENIZE = "retokenise"
    """Sampled turns went through text: trained ids differ from sampled ids."""
    MISSING_FINAL = "missing_final"
    """Sampled tokens at the end of a turn are not trained."""
    SHIFT = "shift"
    """Sampling logprobs are one position away from their tokens."""
    DROPOUT = "dropout"
    """The trainer's forward pass is random: it contradicts itself on the same rows."""
    STALE_WEIGHTS = "stale_weights"
    """The engine computes with other weights than the trainer."""
    STALE_ROLLOUTS = "stale_rollouts"
    """Engine and trainer agree now, but the tokens were sampled with other weights or sampling settings."""
    UNKNOWN = "unknown"
    """A disagreement that matches none of the above."""


VARIANTS = (Cause.RETOKENIZE, Cause.MISSING_FINAL, Cause.SHIFT, Cause.DROPOUT, Cause.STALE_WEIGHTS)
"""Causes that `--break` can produce (lab/diagnosis/variants.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Verdict with its reason."""

    severity: Severity
    cause: Cause | None
    explanation: str


OK = Finding(severity=Severity.OK, cause=None, explanation="engine and trainer agree")


def severity_of(metrics: Mapping[str, float]) -> Severity:
    """Compare |kl_v1| and kl_v2 with the thresholds: kl_v1 can cancel, kl_v2 cannot. NaN is critical."""
    sizes = abs(metrics.get("kl_v1", 0.0)), metrics.get("kl_v2", 0.0)
    if not all(size <= CRITICAL_KL for size in sizes):
        return Severity.CRITICAL
    return Severity.WARNING if max(sizes) > WARNING_KL else Severity.OK


def judge(evidence: Evidence) -> Finding:
    """Grade the evidence and name its cause. Rows that contradict the record are critical at any divergence."""
    severity = max(severity_of(evidence.mismatch), severity_of(evidence.noise))
    if not evidence.match.is_exact:
        severity = Severity.CRITICAL
    if severity is Severity.OK:
        if evidence.whole is None or not evidence.whole.whole.is_wrong:
            return OK
        explanation = f"log p of the sampled tokens agree, but {evidence.whole.explanation}"
        return Finding(severity=Severity.WARNING, cause=Cause.UNKNOWN, explanation=explanation)
    cause, explanation = _cause(evidence)
    return Finding(severity=severity, cause=cause, explanation=explanation)


def _cause(evidence: Evidence) -> tuple[Cause, str]:
    match, by_offset = evidence.match, evidence.abs_diff_by_offset
    if match.same_id < match.trained:
        return Cause.RETOKENIZE, (
            f"{match.trained - match.same_id} of {match.trained} trained ids differ from the sampled ids "
            f"(id match rate {match.id_match_rate:.3f}): a sampled turn was rendered or tokenized again"
        )
    if match.trained < match.sampled:
        where = "at the end of turns" if match.lost_ends else "in whole turns"
        return Cause.MISSING_FINAL, (
            f"{match.sampled - match.trained} of {match.sampled} sampled tokens are not trained, {where}; the trained "
            "ones are right, so no divergence shows it"
        )
    best = min(by_offset, key=lambda offset: by_offset[offset], default=0)
    if best and by_offset[best] < SHIFT_RATIO * by_offset[0]:
        return Cause.SHIFT, (
            f"sampling logprobs fit one position {'late' if best > 0 else 'early'}: mean |Δ log π| "
            f"{by_offset[best]:.2g} there, {by_offset[0]:.2g} at their own position; inputs and targets are shifted "
            "against each other"
        )
    if evidence.noise.get("kl_v2", 0.0) > NOISE_RATIO * evidence.mismatch.get("kl_v2", 0.0):
        return Cause.DROPOUT, (
            f"the trainer contradicts itself: kl_v2 {evidence.noise['kl_v2']:.2g} between two passes over the same "
            f"rows, {evidence.mismatch['kl_v2']:.2g} against the engine; dropout is on, or rows of one pack attend to "
            "each other"
        )
    if match.same < match.trained:
        return Cause.UNKNOWN, (
            f"{match.trained - match.same} of {match.trained} trained tokens carry a logprob that the engine did not "
            "report for them"
        )
    return _weights_cause(evidence.engine)


def _weights_cause(engine: EngineCheck | None) -> tuple[Cause, str]:
    """Tell a stale engine from stale rollouts, given that ids, positions and the trainer are right."""
    if engine is None:
        return Cause.STALE_ROLLOUTS, (
            "ids and positions are right and the trainer is consistent, so these tokens were sampled with other "
            "weights or another temperature than they are scored with: set model.path to the weights that sampled "
            "them, and rollout.temperature as in their run"
        )
    if engine.engine_vs_trainer > SAME_WEIGHTS_RATIO * engine.record_vs_trainer:
        own = "" if engine.engine_vs_record is None else f", {engine.engine_vs_record:.2g} from what it recorded"
        return Cause.STALE_WEIGHTS, (
            f"asked again, the engine is {engine.engine_vs_trainer:.2g} nats a token away from the trainer{own}: it "
            "computes with other weights (a weight sync is missing) or in another precision"
        )
    return Cause.STALE_ROLLOUTS, (
        f"asked again, the engine agrees with the trainer ({engine.engine_vs_trainer:.2g} nats a token), but the "
        "recorded logprobs do not: these tokens were sampled with earlier weights or other sampling settings"
    )
