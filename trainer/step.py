"""One step of training, from prompts to weights in the engine. Start reading at `Trainer.step`.

Every rank runs the same lines. Ranks without an engine have no rollouts of their own until `_exchange`, after which
all ranks know all rows; each then scores and trains the share of them that `trainer/batch/assignment.py` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from rollout.errors import TrainingError
from rollout.sampler.sampler import OnRollout
from rollout.weights.sync import SyncReport, WeightSync
from trainer.batch.step_batch import StepBatch, decode, encode
from trainer.collect.groups import Collected
from trainer.collect.source import RolloutSource
from trainer.config.schema import Config
from trainer.credit.critic_credit import CreditAssignment
from trainer.credit.targets import (
    Logprobs,
    Targets,
    kept_tokens,
    reference_metrics,
    scored_by_the_update,
    token_advantages,
)
from trainer.distributed.distributed import Distributed
from trainer.engines.recovery import Recovery
from trainer.objective.correction import CorrectionResult, correction_weights
from trainer.objective.mismatch import MismatchStatistics, noise_floor
from trainer.observe.metrics_log import BATCH
from trainer.observe.step_metrics import rollout_metrics, throughput
from trainer.observe.step_report import StepReport
from trainer.score.reference import Reference
from trainer.stopwatch import Stopwatch
from trainer.update.updater import Updater

T = TypeVar("T")

MAX_EMPTY_STEPS = 5
"""Steps in a row without one trainable rollout before the run ends: something upstream is broken for good."""


class Trainer:
    """Holds the parts of a run together; what a step does with them is `step`."""

    def __init__(
        self,
        config: Config,
        *,
        distributed: Distributed,
        updater: Updater,
        rollouts: RolloutSource,
        reference: Reference | None,
        sync: WeightSync,
        recovery: Recovery | None = None,
    ) -> None:
        """
        Args:
            reference: None if nothing is penalised for leaving it.
            recovery: None: an engine that dies ends the step.
        """
        self._config = config
        self._distributed = distributed
        self._updater = updater
        self._rollouts = rollouts
        self._reference = reference
        self._sync = sync
        self._recovery = recovery
        self._critic = CreditAssignment(config) if config.has_critic else None
        self._empty_steps = 0
        self.noise_floor: Mapping[str, float] = {}
        """Metrics of the trainer against itself, as last measured; empty before the first time."""
        self.num_steps = 0
        """Rollout batches done; enters the sampling seeds."""
        self.kl_coef = config.algorithm.kl_coef
        """Weight of the KL penalty in the reward; a controller changes it from step to step."""

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer updates that made them."""
        return self._updater.num_updates

    def step(self, on_rollout: OnRollout = lambda rollout: None) -> StepReport:
        watch = Stopwatch()
        collected = self._with_engines(lambda: self._rollouts.collect(self.num_steps, self.version, watch, on_rollout))
        with watch.stage("sync"):
            self._with_engines(self._sync.sleep)
        batch = self._exchange(collected)
        with watch.stage("score"):
            logprobs = self._score(batch)
        correction = self._correct(batch, logprobs.old_N) if logprobs.old_N is not None else None
        targets, advantage_metrics = self._targets(batch, logprobs, correction)
        version = self.version
        with watch.stage("update"):
            update_metrics, logp_seen_N = self._updater.update(batch, targets)
        with watch.stage("sync"):
            synced = self.push_weights()
        self.num_steps += 1
        old_N = logp_seen_N if logprobs.old_N is None else logprobs.old_N
        if correction is None:
            correction = self._correct(batch, old_N)
        logp_train_N = logp_seen_N if self._bypass else old_N
        if logprobs.repacked_N is not None:
            self.noise_floor = noise_floor(logp_train_N, logprobs.repacked_N)
        metrics = {
            BATCH: float(self.num_steps),
            **advantage_metrics,
            **rollout_metrics(collected, batch),
            **self._mismatch(batch, correction, logp_train_N, version),
            **reference_metrics(replace(logprobs, old_N=old_N), batch.rollout_N, batch.num_rollouts),
            **update_metrics,
            **synced.metrics(),
            "rollout/engine_restarts": float(self._recovery.num_restarts if self._recovery else 0),
            **watch.metrics(),
        }
        return StepReport(
            update=self.version,
            metrics=metrics | throughput(metrics),
            rollouts=collected.rollouts,
            batch=batch,
            logp_train_N=logp_train_N,
            advantages_N=targets.advantages_N,
            weights_N=correction.weights_T,
        )

    def push_weights(self) -> SyncReport:
        """Give the engine the weights of this update, and prove that it computes with them; a collective."""
        return self._with_engines(lambda: self._sync.push(self.version))

    def _with_engines(self, act: Callable[[], T]) -> T:
        """Do something that an engine may end by dying."""
        return act() if self._recovery is None else self._recovery.attempt(act)

    # The stages

    def _exchange(self, collected: Collected) -> StepBatch:
        """All rollouts of the step that are trained, as rows, the same on every rank."""
        payload = self._distributed.together(
            lambda: encode(
                collected.trained,
                mask_truncated=self._config.rollout.mask_truncated,
                greedy_rewards=collected.greedy_rewards,
                with_turn_rewards=self._config.algorithm.turn_rewards,
            )
        )
        batch = decode(self._distributed.gather_bytes(payload))
        self._empty_steps = 0 if batch.num_rollouts else self._empty_steps + 1
        if self._empty_steps >= MAX_EMPTY_STEPS:
            cause = "look at `error` in the newest file of rollouts/ in the run directory"
            if self._config.algorithm.dynamic_sampling:
                cause = (
                    "either all rewards of every group are equal (reward/mean says whether the data is solved or too "
                    "hard; algorithm.dynamic_sampling=false trains on), or rollouts fail: " + cause
                )
            raise TrainingError(f"{MAX_EMPTY_STEPS} steps in a row had no trainable rollout; {cause}")
        return batch

    def _score(self, batch: StepBatch) -> Logprobs:
        """What policy and reference say about the trained tokens before the update, as far as the update needs it."""
        scorer = self._updater.scorer
        old_N = values_N = repacked_N = None
        if self._critic is not None:
            old_N, values_N = scorer.score_with_values(batch)
        elif not self._bypass and not scored_by_the_update(self._config):
            old_N = scorer.score(batch)
        if self._bypass:
            old_N = batch.sampling_logprobs_N
        every = self._config.correction.noise_floor_every
        if every and batch.num_rollouts and (self.num_steps % every == 0 or not self.noise_floor):
            repacked_N = scorer.score_repacked(batch)
        ref_N = self._reference.score(batch) if self._reference else None
        return Logprobs(old_N=old_N, ref_N=ref_N, values_N=values_N, repacked_N=repacked_N)

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

    def _targets(
        self, batch: StepBatch, logprobs: Logprobs, correction: CorrectionResult | None
    ) -> tuple[Targets, dict[str, float]]:
        """What each token is trained with: the advantage of its rollout, or with a critic one of its own."""
        if self._critic is None:
            keep_N = kept_tokens(batch, correction)
            advantages_N, metrics = token_advantages(batch, logprobs, self._config, keep_N)
            return Targets.of(batch, advantages_N, logprobs, correction), metrics
        assert correction is not None, "a critic needs the old logprobs before the update"
        assigned = self._critic.assign(batch, logprobs, correction, kl_coef=self.kl_coef)
        self.kl_coef = assigned.next_kl_coef
        return Targets.of(batch, assigned.advantages_N, logprobs, correction, assigned.credit), assigned.metrics

    # Numbers

    @property
    def _bypass(self) -> bool:
        return self._config.correction.logp_old == "bypass"

    def _mismatch(
        self, batch: StepBatch, correction: CorrectionResult, logp_train_N: torch.Tensor, version: int
    ) -> dict[str, float]:
        """`rollout_correction/*`: how far apart engine and trainer are on the tokens of this step.

        The noise floor is the last one that was measured.
        """
        if self._config.correction.mode == "none" or not len(logp_train_N):
            return correction.metrics
        # In bypass mode the ratio of the loss is the weight, known since the update's own forward pass.
        applied = self._correct(batch, logp_train_N).as_applied_by_the_loss() if self._bypass else correction
        statistics = MismatchStatistics.from_tokens(
            logp_train_N,
            batch.sampling_logprobs_N,
            batch.rollout_N,
            batch.num_rollouts,
            correction=applied,
            version_T=batch.versions_N,
            current_version=version,
        )
        return statistics.finalize() | correction.metrics | dict(self.noise_floor)
