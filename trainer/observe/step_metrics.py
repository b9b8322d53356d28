"""Report of one step and its metrics: `reward/*`, `rollout/*`, `environment/*`, `perf/*` and those of the stages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from lockstep.rewards.shaping import OVERLONG
from lockstep.rollout.episode.prepared_calls import counts_of
from lockstep.rollout.episode.token_metrics import TokenCounts
from lockstep.rollout.records import Cause, Rollout, RolloutStatus, TrainingRow
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.credit.targets import Logprobs, reference_metrics
from lockstep.trainer.objective.correction.mismatch import Spread, mismatch_metrics
from lockstep.trainer.objective.correction.weights import CorrectionResult
from lockstep.trainer.stopwatch import Stopwatch

IDLE_STAGES = ("rollout", "reward", "wait")
"""Stages of a step in which the trainer computes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step, after its weights are in the engine."""

    update: int
    """Number of optimizer updates done."""
    metrics: Mapping[str, float]
    rollouts: Sequence[Rollout]
    """Rollouts of this rank's engine; empty on ranks without one."""
    batch: StepBatch
    """Rows of the rollouts; empty on demonstrations alone. Rank 0 has all rows, another rank those that it computed: it
    may ask for `batch.rows[i]` if `i in batch.rows.here`."""
    given: Mapping[str, StepBatch] = field(default_factory=dict)
    """Rows of other components in the last optimizer step, by name, as `batch`."""
    logp_train_N: Tensor
    """The trainer's logprobs of the trained tokens, with the weights that sampled them."""
    advantages_N: Tensor
    weights_N: Tensor
    """Correction weights."""


def step_metrics(stages: Sequence[Mapping[str, float]], watch: Stopwatch, num_tokens: int) -> dict[str, float]:
    """Return the metrics of all stages with their times and `perf/*`. num_tokens: trained tokens, on all ranks."""
    metrics = {name: value for stage in stages for name, value in stage.items()} | watch.metrics()
    return metrics | throughput(metrics, num_tokens)


def trained_rollout_metrics(
    *,
    collected: Collected,
    batch: StepBatch,
    logprobs: Logprobs,
    trained_N: Tensor,
    correction: CorrectionResult,
    spread: Spread,
    version: int,
    noise_floor: Mapping[str, float],
    settings: CorrectionConfig,
    pass_threshold: float,
) -> dict[str, float]:
    """Return the metrics of a step that need rollouts: theirs, and those of correction, reference and teacher.

    Args:
        trained_N: the trainer's logprobs of the trained tokens before the update.
        correction: the correction as it was applied.
        spread: divides work among the ranks.
        version: of the weights before the update.
        noise_floor: as last measured.
    """
    metrics = rollout_metrics(collected, batch, pass_threshold)
    if settings.mode != "none" and batch.layout.num_tokens:
        metrics |= mismatch_metrics(
            trained_N,
            batch.sampling_logprobs_N,
            batch.rollout_N,
            batch.num_rollouts,
            correction=correction,
            version_T=batch.versions_N,
            current_version=version,
            spread=spread,
        )
        metrics |= noise_floor
    old_N = trained_N if logprobs.old.logp_N is None else logprobs.old.logp_N
    metrics |= correction.metrics | reference_metrics(old_N, logprobs.ref_N, batch)
    if batch.teacher is not None:
        from lockstep.trainer.objective.distillation.sampled import teacher_metrics  # other runs do not load it

        metrics |= teacher_metrics(trained_N, batch.teacher.logp_N, batch.teacher.top_mass_N)
    return metrics


def rollout_metrics(collected: Collected, batch: StepBatch, pass_threshold: float) -> dict[str, float]:
    """Return counts and means over rollouts and rows; on ranks without rollouts only over rows."""
    metrics = {
        "rollout/delivered": float(batch.num_rollouts),
        "rollout/trained_tokens": float(batch.layout.num_tokens),
        "rollout/dropped_truncated": float((~batch.is_kept_S).sum()),
    }
    if not collected.rollouts:
        return metrics
    return (
        metrics
        | reward_metrics(collected.rollouts, pass_threshold)
        | _sampling_metrics(collected.rollouts)
        | token_metrics(collected.trained, batch)
        | outcome_metrics(collected.rollouts)
        | dict(collected.metrics)
    )


def reward_metrics(rollouts: Sequence[Rollout], pass_threshold: float) -> dict[str, float]:
    """Return metrics over all rollouts with a reward, including groups that dynamic sampling drops."""
    scored_rollouts = [rollout for rollout in rollouts if rollout.is_trainable]
    if not scored_rollouts:
        return {}
    rewards = np.array([rollout.reward for rollout in scored_rollouts])
    metrics = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    rewards_of: defaultdict[int, set[float]] = defaultdict(set)
    for rollout in scored_rollouts:
        rewards_of[rollout.group_id].add(rollout.reward)
    verdicts = [min(own) >= pass_threshold for own in rewards_of.values() if len(own) == 1]
    for name, is_solved in (("solved", True), ("failed", False)):
        metrics[f"reward/flat_{name}_fraction"] = verdicts.count(is_solved) / len(rewards_of)
    if OVERLONG in scored_rollouts[0].rewards:
        metrics[f"reward/{OVERLONG}/mean"] = float(np.mean([rollout.rewards[OVERLONG] for rollout in scored_rollouts]))
    return metrics


def _sampling_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    token_counts = np.array([rollout.num_sampled for rollout in rollouts])
    metrics = {
        "rollout/sampled_tokens": float(token_counts.sum()),
        "rollout/sampled_tokens_mean": float(token_counts.mean()),
        "rollout/sampled_tokens_max": float(token_counts.max()),
        "rollout/duration_s_max": max(rollout.duration_s for rollout in rollouts),
    }
    drop_counts = Counter(rollout.dropped_by for rollout in rollouts)
    metrics |= {f"rollout/dropped_{cause}": float(drop_counts[cause]) for cause in Cause}
    metrics["rollout/dropped_fraction"] = 1 - drop_counts[None] / len(rollouts)
    for status in RolloutStatus:
        metrics[f"rollout/{status}_fraction"] = sum(r.status is status for r in rollouts) / len(rollouts)
    return metrics


def token_metrics(rollouts: Sequence[Rollout], batch: StepBatch) -> dict[str, float]:
    """Return the agreement of the trained rows with the engine's answers; a row that has changed on its way to another
    rank is refused there (`trainer/batch/dealt_batch.py`)."""
    rows: dict[int, list[TrainingRow]] = {}
    for row in batch.rows:
        rows.setdefault(row.rollout_id, []).append(row)
    delivered_rollouts = (rollout for rollout in rollouts if rollout.is_trainable)
    counts = (counts_of(rollout, rows.get(rollout.rollout_id, [])) for rollout in delivered_rollouts)
    return sum(counts, TokenCounts()).metrics()


def outcome_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean over rollouts of every number that environments report, with 0 for those that do not.

    Where some report something else under the name, the mean is over the others, and `<name>/not_numbers` counts them.
    """
    names = sorted({name for r in rollouts for name, value in r.outcome.items() if isinstance(value, (int, float))})
    metrics = {}
    for name in names:
        values = [r.outcome.get(name, 0) for r in rollouts]
        numbers = [value for value in values if isinstance(value, (int, float))]
        metrics[f"environment/{name}"] = float(np.mean(numbers, dtype=np.float64))
        if len(numbers) < len(values):
            metrics[f"environment/{name}/not_numbers"] = float(len(values) - len(numbers))
    return metrics


def throughput(metrics: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Return `perf/*` from counts and times; rates of sampling only if this rank has rollouts.

    num_tokens: trained tokens, on all ranks.
    """
    trained_s = metrics["time/score"] + metrics["time/update"]
    rates = {"perf/trained_tokens_per_s": num_tokens / trained_s}
    if sampled_tokens := metrics.get("rollout/sampled_tokens"):
        rates |= {
            "perf/tokens_per_s": sampled_tokens / metrics["time/step"],
            # With rollouts in flight (`rollout.max_staleness`) sampling goes on during the whole step.
            "perf/generated_tokens_per_s": sampled_tokens / metrics.get("time/rollout", metrics["time/step"]),
            "perf/idle_frac": sum(metrics.get(f"time/{stage}", 0.0) for stage in IDLE_STAGES) / metrics["time/step"],
        }
    return rates
