"""Update of the policy on the rows of a step: minibatches, each one optimizer step over all components of the loss.

Dimensions: _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.start_checks.rounding import rounding_errors
from lockstep.trainer.objective.own.lookup import policy_loss_named
from lockstep.trainer.objective.per_rollout import rollout_count
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.score.whole_step import ConfiguredLoss
from lockstep.trainer.update.components.component import GivenRows, RolloutStep, TokenSet
from lockstep.trainer.update.components.table import rollout_terms
from lockstep.trainer.update.entropy_control import EntropyControl
from lockstep.trainer.update.optimizer_step import OptimizerStep, Stepped
from lockstep.trainer.update.routers import Routers
from lockstep.trainer.update.schedule import learning_rate
from lockstep.trainer.update.update_guard import Attempt, UpdateGuard

if TYPE_CHECKING:
    from lockstep.trainer.batch.packed_images import ImageSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updated:
    """Outcome of the optimizer steps on one rollout batch."""

    metrics: Mapping[str, float]
    """Means over the optimizer steps that were made, or over the skipped ones if all were."""
    logp_N: Tensor
    """Logprobs of the trained tokens in their first forward pass of the update."""
    given: Mapping[str, StepBatch] = field(default_factory=dict)
    """Rows of other components in the last optimizer step, by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """Rollouts of one optimizer step."""

    batch: StepBatch
    targets: Targets
    """Targets of these rollouts."""
    rollouts: np.ndarray
    """Indices in the batch."""
    seen_N: Tensor
    """(N,) logprobs so far; the NaN of tokens in this step are replaced by their logprobs."""
    is_first: bool
    """True if the old logprobs are still those of θ."""


class Updater:
    """The trained module with its optimizer steps and its scorer."""

    def __init__(
        self,
        module: nn.Module,
        distributed: Distributed,
        config: Config,
        *,
        given: Sequence[GivenRows] = (),
        images: ImageSource | None = None,
    ) -> None:
        """given: components with rows of their own. images: of the rows; None for a model that sees none."""
        self._module = module
        self._distributed = distributed
        self._config = config
        self._plan, self._images = config.plan, images
        self.scorer = Scorer(
            module,
            distributed,
            temperature=config.rollout.temperature,
            token_budget=config.pack_tokens,
            share_prefixes=config.share_prefixes,
            images=images,
        )
        self._routers = Routers(module, self.scorer, config.algorithm, replays=self._plan.replays)
        self.loss = ConfiguredLoss(policy_loss_named(config.algorithm.loss), config.algorithm, seed=config.seed)
        self.given = given
        self.num_updates = 0
        """Number of optimizer steps done; the version of the weights."""
        self.entropy = EntropyControl(coef=config.algorithm.entropy_coef)
        """Controller of the entropy bonus, the same on every rank."""
        self.guard = UpdateGuard(config.optimizer)
        self._stepper = OptimizerStep(
            module, distributed, self.scorer, routers=self._routers, guard=self.guard, has_critic=self._plan.has_critic
        )
        self.dump: Callable[[Attempt, StepBatch | None, Targets | None, Mapping[str, StepBatch]], object] = (
            lambda *batch: None
        )
        """Callback that saves the rows of an optimizer step that the guard objects to; called on every rank. Takes the
        rollouts with their targets, None without, and the rows of other components by name."""

    def update(
        self,
        batch: StepBatch,
        targets: Targets,
        stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> Updated:
        """Run all epochs and minibatches of one rollout batch; a collective.

        A run without rollouts makes one step on the rows of other components. stage: times the drawing of these rows.
        """
        steps: list[dict[str, float]] = []
        skips: list[dict[str, float]] = []
        other_rows: Mapping[str, StepBatch] = {}
        seen_N = torch.full((batch.layout.num_tokens,), torch.nan)
        lr = self._learning_rate()  # one for all epochs and minibatches of a rollout batch
        for minibatch in self.parts(batch, targets, seen_N):
            before = self.num_updates
            other_rows = self._draw(stage)
            report = self.optimizer_step(minibatch, other_rows, lr=lr)
            (steps if self.num_updates > before else skips).append(report)
        seen_N = self._distributed.sum(seen_N.nan_to_num())
        reports = steps or skips
        means = {name: float(np.mean([r[name] for r in reports])) for name in reports[0]} if reports else {}
        return Updated(metrics=means | self._health(), logp_N=seen_N, given=other_rows)

    def logprobs(self, ids: Sequence[int], error: float = 0.0) -> list[float]:
        """Return log π(ids[i] | ids[:i]) at temperature 1 for i ≥ 1, by the trainer's own forward; a collective.

        ids: with their images if they are `PromptIds`; the tokens of images have no logprob. error: relative rounding
        error to add to the output of each layer.
        """
        packed = collate([whole_row(ids)], [0], images=self._images, device=self._distributed.device)
        with torch.no_grad(), rounding_errors(self._module, error):
            logp_T, *_ = self._module(packed, temperature=1.0, with_entropy=False)
        return logp_T.float().tolist()

    def optimizer_step(
        self, minibatch: Minibatch | None, given: Mapping[str, StepBatch], *, lr: float
    ) -> dict[str, float]:
        """Make one step on these rows, unless the guard objects; a collective.

        Args:
            minibatch: rollouts; None: the rows of other components alone.
            given: rows of other components by name.

        Raises `TrainingError` on all ranks after too many skipped steps in a row.
        """
        critic_only = self._plan.trains_critic_alone(self.num_updates)
        if self._plan.ends_warmup(self.num_updates):
            self.guard.forget_norms()  # norms of the critic alone say nothing about those of both
        routers = self._routers if minibatch is None else None
        token_sets = [] if minibatch is None else [self.on_rollouts(minibatch)]
        token_sets += [
            one.token_set(given[one.name], update=self.num_updates, routers=routers)
            for one in self.given
            if one.name in given
        ]
        result = self._stepper.make(token_sets, lr=lr, critic_only=critic_only)

        def dump(judged: Attempt) -> None:
            if minibatch is None:
                self.dump(judged, None, None, given)
                return
            attempt = replace(judged, rollouts=tuple(minibatch.rollouts.tolist()), is_first=minibatch.is_first)
            self.dump(attempt, minibatch.batch, minibatch.targets, given)

        metrics = self._finished(result, lr, dump)
        if metrics.get("loss/policy_tokens") and not (critic_only or result.judgment.is_skipped):
            self.entropy = self.entropy.after(metrics["policy/entropy"], self._config.algorithm)
        return metrics

    def _draw(self, stage: Callable[[str], AbstractContextManager[None]]) -> dict[str, StepBatch]:
        """Return the next rows of other components; none while the critic trains alone, because they train the
        policy."""
        if self._plan.trains_critic_alone(self.num_updates):
            return {}
        return {one.name: one.draw(stage) for one in self.given}

    def on_rollouts(self, minibatch: Minibatch) -> TokenSet:
        """Return the rows of an optimizer step with their terms; a collective."""
        batch, targets = minibatch.batch, minibatch.targets
        rows = np.flatnonzero(np.isin(batch.layout.rollout_index, minibatch.rollouts)).tolist()
        step = RolloutStep(
            algorithm=self._config.algorithm,
            horizon=self._config.horizon,
            trains_critic_alone=self._plan.trains_critic_alone(self.num_updates),
            loss=self.loss,
            scorer=self.scorer,
            routers=self._routers,
            batch=batch,
            targets=targets,
            tokens_S=rollout_count(batch.rollout_N[targets.keep_N], batch.num_rollouts),
            rollouts=minibatch.rollouts,
            rows=rows,
            is_first=minibatch.is_first,
            update=self.num_updates,
            entropy_coef=self.entropy.weight(self._config.algorithm),
        )
        return TokenSet(
            batch=batch,
            rows=rows,
            terms=rollout_terms(step),
            temperature=self._config.rollout.temperature,
            keep_N=targets.keep_N,
            seen_N=minibatch.seen_N,
        )

    def _health(self) -> dict[str, float]:
        of_data = {name: value for one in self.given for name, value in one.metrics().items()}
        return {"health/skipped_updates": float(self.guard.skipped), **of_data}

    def _finished(self, stepped: Stepped, lr: float, dump: Callable[[Attempt], object]) -> dict[str, float]:
        """Dump and count a step by its judgment; return its metrics."""
        judgment = stepped.judgment
        if judgment.reason is not None:
            attempt = Attempt(
                update=self.num_updates + 1,
                number=self.guard.in_a_row,
                lr=lr,
                reason=judgment.reason,
                sums=stepped.sums,
                grad_norm=stepped.grad_norm,
            )
            dump(attempt)
        if judgment.is_skipped:
            self.guard.raise_after_repeated_skips(self.num_updates + 1, judgment)
        else:
            self.num_updates += 1
        return dict(stepped.metrics)

    def _learning_rate(self) -> float:
        return learning_rate(self.num_updates, self._config.optimizer, total_updates=self._config.updates)

    def _minibatches(self, num_rollouts: int) -> Iterator[np.ndarray]:
        """Yield the rollout indices of each optimizer step: a permutation per epoch, cut into equal parts."""
        algorithm = self._config.algorithm
        for epoch in range(algorithm.epochs):
            if algorithm.minibatches == 1:
                yield np.arange(num_rollouts)
                continue
            order = np.random.default_rng([self._config.seed, self.num_updates, epoch]).permutation(num_rollouts)
            yield from np.array_split(order, algorithm.minibatches)

    def parts(self, batch: StepBatch, targets: Targets, seen_N: Tensor) -> Iterator[Minibatch | None]:
        """Yield the rows of each optimizer step: None in a run without rollouts."""
        if not self._config.has_rollouts:
            yield None
        is_first = True
        for rollouts in self._minibatches(batch.num_rollouts):
            if len(rollouts):
                own = targets.for_rollouts(torch.from_numpy(rollouts), self._config.algorithm)
                yield Minibatch(batch=batch, targets=own, rollouts=rollouts, seen_N=seen_N, is_first=is_first)
                is_first = False
