"""One step of training, from prompts to weights in the engine. Start reading at `Trainer.step`.

    prompts ─► rollouts ─► rewards                    collect
                  └─► training rows                   share
                         └─► logprobs                 score
                                └─► weights           correct
                                       └─► targets    assign_credit
                                              └─► optimizer steps    update
                                                     └─► weights in the engine    push_weights

Every rank runs the same lines. Only rank 0 has rollouts; after `_share` all ranks have the numbers of all rows, and
each scores and trains the rows that `trainer/batch/assignment.py` assigns to it. On demonstrations alone
(`algorithm=sft`) a step has no rollouts: the rows come to the update as they do beside rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from lockstep.rollout.errors import TrainingError
from lockstep.rollout.records import Cause, Rollout
from lockstep.rollout.sampler.sampler import OnRollout
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.collect.source import RolloutSource
from lockstep.trainer.config.plan import OldLogprobs
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import FromEngine, FromUpdate, Recomputed
from lockstep.trainer.credit.targets import Logprobs, Targets, rollout_targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.recovery import Recovery
from lockstep.trainer.objective.correction.mismatch import QUANTIZATION_K3, noise_floor, quantization_cost
from lockstep.trainer.observe.metrics_log import BATCH
from lockstep.trainer.observe.step_metrics import StepReport, step_metrics, trained_rollout_metrics
from lockstep.trainer.stopwatch import Stopwatch
from lockstep.trainer.update.updater import Updater

if TYPE_CHECKING:  # of runs with a teacher
    from lockstep.trainer.engines.averaged_teacher import AveragedTeacher
    from lockstep.trainer.engines.teacher import Teacher
    from lockstep.trainer.score.reference import Reference

T = TypeVar("T")

MAX_EMPTY_STEPS = 5
"""Number of consecutive steps without a trainable rollout after which the run ends, because the cause persists."""


class Trainer:
    """Stages of a training step, and the state between steps."""

    def __init__(
        self,
        config: Config,
        *,
        distributed: Distributed,
        updater: Updater,
        rollouts: RolloutSource | None,
        reference: Reference | None = None,
        teacher: Teacher | None = None,
        averaged: AveragedTeacher | None = None,
        sync: WeightSync | None = None,
        recovery: Recovery | None = None,
        is_quantized: bool = False,
    ) -> None:
        """rollouts: None on demonstrations alone. reference: None without a KL term. teacher: None without
        distillation. averaged: weights of the teacher, if they are an average of the policy's. sync: None without
        engines. recovery: None if the death of an engine ends the step. is_quantized: True if engines compute with
        quantized weights."""
        self._config = config
        self._is_quantized = is_quantized or config.rollout.quantization is not None
        self._distributed = distributed
        self._updater = updater
        self._rollouts = rollouts
        self._reference = reference
        self._teacher = teacher
        self._averaged = averaged
        self._sync = sync
        self._recovery = recovery
        self._plan = config.plan
        self._empty_steps = 0
        self.noise_floor: Mapping[str, float] = {}
        """Metrics of the last measured noise floor, and what quantized rollouts cost; empty before the first."""
        self.num_steps = 0
        """Number of rollout batches done; enters the sampling seeds."""
        self.kl_coef = config.algorithm.kl_coef
        """Weight of the KL penalty in the reward; a controller may change it after each step."""

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer updates done."""
        return self._updater.num_updates

    def step(
        self, on_rollout: OnRollout = lambda rollout: None, on_stage: Callable[[str], None] = lambda name: None
    ) -> StepReport:
        """Make one training step; a collective. on_stage: called with its name when a stage begins."""
        watch, version = Stopwatch(on_stage), self.version
        collection = self._collect(watch, on_rollout)
        batch = self._share(collection, watch)
        if self._sync is not None:
            with watch.stage("sync"):
                self._with_engines(self._sync.sleep)  # after the teacher, which may be the policy in the same engines
        with watch.stage("score"):
            logprobs, batch = self._score(batch)
        correction = StepCorrection.of(batch, logprobs.old, self._config.correction)
        targets, credit_metrics = self._assign_credit(batch, logprobs, correction)
        with watch.stage("update"):
            update_report = self._updater.update(batch, targets, watch.stage)
        with watch.stage("sync"):
            if self._averaged is not None and self.version > version:
                self._averaged.advance()
            self.num_steps += 1  # the batch is trained: a checkpoint of this moment is whole
            sync_metrics = self.push_weights()
        trained_N = logprobs.old.by_trainer(update_report.logp_N)
        if logprobs.repacked_N is not None:
            self.noise_floor = {**self.noise_floor, **noise_floor(trained_N, logprobs.repacked_N)}
        if self._is_quantized and QUANTIZATION_K3 not in self.noise_floor and (batch.versions_N == version).all():
            self.noise_floor = {**self.noise_floor, **quantization_cost(trained_N, batch.sampling_logprobs_N)}
        correction_result = correction.measured(batch, trained_N)
        stages = [{BATCH: float(self.num_steps)}, update_report.metrics, sync_metrics]
        stages += [part.measured for part in (self._teacher, self._averaged) if part is not None]
        num_tokens = sum(rows.layout.num_tokens for rows in update_report.given.values())
        if self._rollouts is not None:
            num_tokens = batch.layout.num_tokens
            stages.append({"rollout/engine_restarts": float(self._recovery.num_restarts if self._recovery else 0)})
            stages.append(credit_metrics)
            stages.append(
                trained_rollout_metrics(
                    collected=collection,
                    batch=batch,
                    logprobs=logprobs,
                    trained_N=trained_N,
                    correction=correction_result,
                    spread=self._distributed.spread,
                    version=version,
                    noise_floor=self.noise_floor,
                    settings=self._config.correction,
                    pass_threshold=self._config.eval.pass_threshold,
                )
            )
        return StepReport(
            update=self.version,
            metrics=step_metrics(stages, watch, num_tokens),
            rollouts=collection.rollouts,
            batch=batch,
            given=update_report.given,
            logp_train_N=trained_N,
            advantages_N=targets.advantages_N,
            weights_N=correction_result.weights_T,
        )

    def push_weights(self) -> Mapping[str, float]:
        """Send the current weights to the engines, verify them there, and return `sync/*`; a collective."""
        if (sync := self._sync) is None:
            return {}
        report = self._with_engines(lambda: sync.push(self.version))
        if self._averaged is not None:
            self._averaged.push(self.version)
        return report.metrics() | sync.take_changes()

    def _with_engines(self, act: Callable[[], T]) -> T:
        """Call `act`, and recover from the death of an engine."""
        return act() if self._recovery is None else self._recovery.attempt(act)

    # The stages

    def _collect(self, watch: Stopwatch, on_rollout: OnRollout) -> Collected:
        """Sample rollouts with their rewards."""
        if (source := self._rollouts) is None:
            return Collected()
        return self._with_engines(lambda: source.collect(self.num_steps, self.version, watch, on_rollout))

    def _share(self, collected: Collected, watch: Stopwatch) -> StepBatch:
        """Return the rows of the trained rollouts, with a teacher's scores of their tokens: one batch for all ranks."""
        batch = self._distributed.together(
            lambda: StepBatch.of(
                collected.trained,
                mask_truncated=self._config.rollout.mask_truncated,
                greedy_rewards=collected.greedy_rewards,
                reward_weights=self._config.reward.weight_by_name,
                with_turn_rewards=self._plan.turn_rewards,
                with_states=self._plan.needs_states,
                with_routes=self._plan.replays_engine,
            )
        )
        if self._teacher is not None:
            teacher, every = self._teacher, self._config.correction.noise_floor_every
            is_due = bool(every) and self.num_steps % every == 0
            with watch.stage("teacher"):
                batch = self._with_engines(lambda: teacher.scored(batch, collected.trained, measures_floor=is_due))
        if self._distributed.world_size > 1:
            from lockstep.trainer.batch.dealt_batch import dealt  # runs on one rank do not load it

            batch = dealt(batch, self._distributed)
        self._empty_steps = 0 if batch.num_rollouts or self._rollouts is None else self._empty_steps + 1
        if self._empty_steps >= MAX_EMPTY_STEPS or (self._empty_steps and self.version == 0):
            self._distributed.together(lambda: self._refuse_empty(collected.rollouts))
        return batch

    def _refuse_empty(self, rollouts: Sequence[Rollout]) -> None:
        """Raise `TrainingError` on rank 0, with the first failure, after the last of `MAX_EMPTY_STEPS`.

        Before the first update also at once, if all rollouts failed alike: then it is a fault of the program.
        """
        if not self._distributed.is_main:
            return
        fails_alike = self.version == 0 and _fail_alike(rollouts)
        if self._empty_steps < MAX_EMPTY_STEPS and not fails_alike:
            return
        counts = Counter(rollout.dropped_by or "filtered" for rollout in rollouts)
        why = ", ".join(f"{cause} {count}" for cause, count in counts.items())
        first = next((f"; the first failure: {rollout.error}" for rollout in rollouts if rollout.error), "")
        if "filtered" in counts:
            first += (
                "; filtered are groups whose rewards are all equal: reward/mean says whether the data is solved or too "
                "hard, and algorithm.dynamic_sampling=false trains on"
            )
        steps = f"{MAX_EMPTY_STEPS} steps in a row had no trainable rollout"
        raise TrainingError(f"{'all rollouts failed alike' if fails_alike else steps} ({why}){first}")

    def _score(self, batch: StepBatch) -> tuple[Logprobs, StepBatch]:
        """Score the trained tokens with policy, critic and reference, as far as the update needs it.

        Returns the batch, too: with `correction.routing_replay=old` its rows have the experts of the policy's pass.
        """
        scorer, plan = self._updater.scorer, self._plan
        trained_N = values_N = repacked_N = None
        if plan.scores_policy:
            trained_N, values_N, batch = scorer.score_with(batch, values=plan.has_critic, routes=plan.replays_old)
        every = self._config.correction.noise_floor_every
        if every and batch.num_rollouts and (self.num_steps % every == 0 or not self.noise_floor):
            repacked_N = scorer.score_repacked(batch)
        ref_N = self._reference.score(batch) if self._reference else None
        if plan.old is OldLogprobs.ENGINE:
            old = FromEngine(batch.sampling_logprobs_N)
        else:
            old = FromUpdate() if trained_N is None else Recomputed(trained_N)
        return Logprobs(old=old, ref_N=ref_N, values_N=values_N, repacked_N=repacked_N), batch

    def _assign_credit(
        self, batch: StepBatch, logprobs: Logprobs, correction: StepCorrection
    ) -> tuple[Targets, Mapping[str, float]]:
        """Assign advantages to tokens: per rollout, per turn, or with a critic per token."""
        if not self._plan.has_critic:
            return rollout_targets(batch, logprobs, correction, self._config.algorithm)
        from lockstep.trainer.credit.critic_credit import critic_targets  # other runs do not load it

        credit = critic_targets(batch, logprobs, correction, self._config.algorithm, kl_coef=self.kl_coef)
        self.kl_coef = credit.next_kl_coef
        return credit.targets, credit.metrics


def _fail_alike(rollouts: Sequence[Rollout]) -> bool:
    """Return True if each of several rollouts failed with the same sentence, the place of its data row aside."""
    errors = {
        (rollout.dropped_by, (rollout.error or "").replace(f" ({getattr(rollout.example, 'place', '')})", ""))
        for rollout in rollouts
    }
    cause, error = next(iter(errors), (None, ""))
    return len(errors) == 1 and len(rollouts) > 1 and bool(error) and cause is not Cause.ENGINE
