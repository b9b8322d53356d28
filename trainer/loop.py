"""One step of training, from prompts to weights in the engine. Start reading at `Trainer.step`.

Every rank runs the same lines. Ranks without an engine have no rollouts of their own until `exchange`, after which
all ranks know all rows; each then scores and trains the share of them that `trainer/balance.py` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rewards.composition import RewardSet
from rollout.engine import Sampling
from rollout.errors import TrainingError
from rollout.loop import BackgroundLoop
from rollout.records import Rollout, RolloutStatus, TrainingRow
from rollout.sampler import OnRollout, Sampler
from rollout.sync import SyncReport, WeightSync
from rollout.token_metrics import TokenCounts, count_tokens
from trainer.advantages import ADVANTAGES
from trainer.batch import StepBatch, decode, encode
from trainer.config import Config
from trainer.correction import CorrectionResult, correction_weights
from trainer.data import Prompts
from trainer.distributed import Distributed
from trainer.mismatch import MismatchStatistics
from trainer.timing import Stopwatch
from trainer.update import Targets, Updater

MAX_EMPTY_STEPS = 5
"""Steps in a row without one trainable rollout before the run ends: something upstream is broken for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step leaves for loggers and people."""

    update: int
    """Optimizer updates done so far."""
    metrics: Mapping[str, float]
    rollouts: Sequence[Rollout]
    """Of this rank's engine; empty on ranks without one."""


class Trainer:
    """Holds the parts of a run together; what a step does with them is `step`."""

    def __init__(
        self,
        config: Config,
        *,
        distributed: Distributed,
        updater: Updater,
        loop: BackgroundLoop,
        sampler: Sampler | None,
        sampling: Sampling,
        rewards: RewardSet,
        prompts: Prompts,
        sync: WeightSync,
    ) -> None:
        self._config = config
        self._distributed = distributed
        self._updater = updater
        self._loop = loop
        self._sampler = sampler
        self._sampling = sampling
        self._rewards = rewards
        self._prompts = prompts
        self._sync = sync
        self._empty_steps = 0
        self.num_steps = 0
        """Rollout batches done; enters the sampling seeds."""

    @property
    def _bypass(self) -> bool:
        return self._config.correction.logp_old == "bypass"

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer updates that made them."""
        return self._updater.num_updates

    def step(self, on_rollout: OnRollout = lambda rollout: None) -> StepReport:
        watch = Stopwatch()
        with watch.stage("rollout"):
            rollouts = self._distributed.together(lambda: self._collect(on_rollout))
        with watch.stage("reward"):
            rollouts = self._distributed.together(lambda: self._score_rewards(rollouts))
        batch = self._exchange(rollouts)
        advantages_S, advantage_metrics = ADVANTAGES[self._config.algorithm.advantage](
            torch.from_numpy(batch.rewards_S), torch.from_numpy(batch.group_S)
        )
        with watch.stage("score"):
            logp_old_N = self._old_logprobs(batch)
        correction = self._correct(batch, logp_old_N)
        version = self.version
        with watch.stage("update"):
            targets = Targets.of(batch, advantages_S, logp_old_N, correction)
            update_metrics, logp_seen_N = self._updater.update(batch, targets)
        with watch.stage("sync"):
            synced = self.push_weights()
        self.num_steps += 1
        metrics = {
            **self._count(rollouts, batch),
            **advantage_metrics,
            **self._mismatch(batch, correction, logp_seen_N if self._bypass else logp_old_N, version),
            **update_metrics,
            **synced.metrics(),
            **watch.metrics(),
        }
        return StepReport(update=self.version, metrics=metrics | throughput(metrics), rollouts=rollouts)

    def push_weights(self) -> SyncReport:
        """Give the engine the weights of this update, and prove that it computes with them; a collective."""
        return self._sync.push(self.version)

    # The stages

    def _collect(self, on_rollout: OnRollout) -> list[Rollout]:
        prompts = self._prompts.take(self._config.rollout.prompts_per_step)  # on all ranks, to keep one cursor
        if self._sampler is None:
            return []
        return self._loop.run(
            self._sampler.collect(
                prompts,
                samples_per_prompt=self._config.rollout.samples_per_prompt,
                sampling=self._sampling,
                step=self.num_steps,
                on_rollout=on_rollout,
            )
        )

    def _score_rewards(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return self._loop.run(self._rewards.score(rollouts)) if rollouts else []

    def _exchange(self, rollouts: Sequence[Rollout]) -> StepBatch:
        """All delivered rollouts of the step as rows, the same on every rank."""
        payload = encode(rollouts, mask_truncated=self._config.rollout.mask_truncated)
        batch = decode(self._distributed.gather_bytes(payload))
        self._empty_steps = 0 if batch.num_rollouts else self._empty_steps + 1
        if self._empty_steps >= MAX_EMPTY_STEPS:
            raise TrainingError(
                f"{MAX_EMPTY_STEPS} steps in a row had no trainable rollout; "
                "look at `error` in the newest file of rollouts/ in the run directory"
            )
        return batch

    def _old_logprobs(self, batch: StepBatch) -> torch.Tensor:
        """(N,) log π_old of all trained tokens: the trainer's own, or in bypass mode the engine's."""
        return batch.sampling_logprobs_N if self._bypass else self._updater.score(batch)

    def _correct(self, batch: StepBatch, logp_old_N: torch.Tensor) -> CorrectionResult:
        """Importance weights between engine and trainer; in bypass mode the ratio of the loss carries them."""
        settings = self._config.correction
        return correction_weights(
            logp_old_N,
            batch.sampling_logprobs_N,
            batch.rollout_N,
            batch.num_rollouts,
            mode="off" if self._bypass else settings.mode,
            bounds=(settings.low, settings.high),
            rejection=settings.rejection,
            batch_normalize=settings.batch_normalize,
        )

    # Numbers

    def _mismatch(
        self, batch: StepBatch, correction: CorrectionResult, logp_train_N: torch.Tensor, version: int
    ) -> dict[str, float]:
        """`rollout_correction/*`: how far apart engine and trainer are on the tokens of this step."""
        if self._config.correction.mode == "none" or not len(logp_train_N):
            return correction.metrics
        statistics = MismatchStatistics.from_tokens(
            logp_train_N,
            batch.sampling_logprobs_N,
            batch.rollout_N,
            batch.num_rollouts,
            correction=None if self._bypass else correction,  # there the ratio of the loss is the weight
            version_T=batch.versions_N,
            current_version=version,
        )
        return statistics.finalize() | correction.metrics

    def _count(self, rollouts: Sequence[Rollout], batch: StepBatch) -> dict[str, float]:
        """`reward/*` and `rollout/*`; on ranks without an engine only what the batch shows."""
        metrics = {
            "rollout/delivered": float(batch.num_rollouts),
            "rollout/trained_tokens": float(batch.layout.num_tokens),
            "data/epoch": self._prompts.epoch,
        }
        if batch.num_rollouts:
            metrics |= {"reward/mean": float(batch.rewards_S.mean()), "reward/std": float(batch.rewards_S.std())}
        if not rollouts:
            return metrics
        sampled = np.array([rollout.num_sampled for rollout in rollouts])
        metrics |= {
            "rollout/sampled_tokens": float(sampled.sum()),
            "rollout/sampled_tokens_mean": float(sampled.mean()),
            "rollout/sampled_tokens_max": float(sampled.max()),
            "rollout/duration_s_max": max(rollout.duration_s for rollout in rollouts),
        }
        for status in RolloutStatus:
            metrics[f"rollout/{status}_fraction"] = sum(r.status is status for r in rollouts) / len(rollouts)
        return metrics | self._rewards.take_metrics() | token_metrics(rollouts, batch) | outcome_metrics(rollouts)


def token_metrics(rollouts: Sequence[Rollout], batch: StepBatch) -> dict[str, float]:
    """Whether the rows that are trained hold what the engine sampled: of the batch, after its journey over ranks."""
    rows: dict[int, list[TrainingRow]] = {}
    for row in batch.rows:
        rows.setdefault(row.rollout_id, []).append(row)
    delivered = (rollout for rollout in rollouts if rollout.is_trainable)
    counts = (count_tokens(rollout.calls, rows.get(rollout.rollout_id, [])) for rollout in delivered)
    return sum(counts, TokenCounts()).metrics()


def outcome_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean per rollout of every number that environments report."""
    names = sorted({name for r in rollouts for name, value in r.outcome.items() if isinstance(value, (int, float))})
    return {f"environment/{name}": float(np.mean([r.outcome.get(name, 0) for r in rollouts])) for name in names}


def throughput(metrics: Mapping[str, float]) -> dict[str, float]:
    """`perf/*` from counts and times."""
    sampled, trained = metrics.get("rollout/sampled_tokens", 0.0), metrics["rollout/trained_tokens"]
    training_s = metrics["time/score"] + metrics["time/update"]
    return {
        "perf/tokens_per_s": sampled / metrics["time/step"],
        "perf/generated_tokens_per_s": sampled / metrics["time/rollout"],
        "perf/trained_tokens_per_s": trained / training_s,
    }
