"""Update of the policy on the rows of a step: minibatches, each one optimizer step over all components of the loss.

Dimensions: _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from lockstep.trainer.update.batch_dumps import Attempt
from lockstep.trainer.update.components.component import GivenRows, RolloutStep, TokenSet
from lockstep.trainer.update.components.table import rollout_terms
from lockstep.trainer.update.entropy_control import EntropyControl
from lockstep.trainer.update.optimizer_step import OptimizerStep, Stepped
from lockstep.trainer.update.routers import Routers
from lockstep.trainer.update.schedule import learning_rate
from lockstep.trainer.update.update_guard import UpdateGuard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updated:
    """Outcome of the optimizer steps on one rollout batch."""

    metrics: Mapping[str, float]
    """Means over the optimizer steps that were made, or over the skipped ones if all were."""
    logp_N: Tensor
    """Logprobs of the trained tokens in their first forward pass of the update."""


class Updater:
    """The trained module with its optimizer steps and its scorer."""

    def __init__(
        self,
        module: nn.Module,
        distributed: Distributed,
        config: Config,
        *,
        given: Sequence[GivenRows] = (),
    ) -> None:
        """given: components with rows of their own."""
        self._module = module
        self._distributed = distributed
        self._config = config
        self._plan = config.plan
        self.scorer = Scorer(
            module,
            distributed,
            temperature=config.rollout.temperature,
            token_budget=config.pack_tokens,
            share_prefixes=config.share_prefixes,
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

    def update(self, batch: StepBatch, targets: Targets) -> Updated:
        """Run all epochs and minibatches of one rollout batch; a collective."""
        made: list[dict[str, float]] = []
        skipped: list[dict[str, float]] = []
        seen_N = torch.full((batch.layout.num_tokens,), torch.nan)
        lr = self._learning_rate()  # one for all epochs and minibatches of a rollout batch
        for rollouts in self._minibatches(batch.num_rollouts):
            if len(rollouts):
                own = targets.for_rollouts(torch.from_numpy(rollouts), self._config.algorithm)
                before = self.num_updates
                report = self.optimizer_step(batch, own, rollouts, seen_N, lr=lr, is_first=not made and not skipped)
                (made if self.num_updates > before else skipped).append(report)
        seen_N = self._distributed.sum(seen_N.nan_to_num())
        reports = made or skipped
        means = {name: float(np.mean([r[name] for r in reports])) for name in reports[0]} if reports else {}
        means |= self._health()
        return Updated(metrics=means, logp_N=seen_N)

    def logprobs(self, ids: Sequence[int], error: float = 0.0) -> list[float]:
        """Return log π(ids[i] | ids[:i]) at temperature 1 for i ≥ 1, by the trainer's own forward; a collective.

        error: relative rounding error to add to the output of each layer.
        """
        packed = collate([whole_row(ids)], [0], device=self._distributed.device)
        with torch.no_grad(), rounding_errors(self._module, error):
            logp_T, *_ = self._module(packed, temperature=1.0, with_entropy=False)
        return logp_T.float().tolist()

    def optimizer_step(
        self,
        batch: StepBatch,
        targets: Targets,
        rollouts: np.ndarray,
        seen_N: Tensor,
        *,
        lr: float,
        is_first: bool,
        given: Mapping[str, StepBatch] | None = None,
    ) -> dict[str, float]:
        """Make one step on these rollouts (indices), unless the guard objects; a collective.

        Args:
            targets: of these rollouts.
            seen_N: (N,) logprobs so far; the NaN of tokens in this step are replaced by their logprobs.
            is_first: True if the old logprobs are still those of θ.
            given: rows of components by name, for a replay; None: the next ones.

        Raises `TrainingError` on all ranks after too many skipped steps in a row.
        """
        rows = np.flatnonzero(np.isin(batch.layout.rollout_index, rollouts)).tolist()
        critic_only = self._plan.trains_critic_alone(self.num_updates)
        if self._plan.ends_warmup(self.num_updates):
            self.guard.forget_norms()  # norms of the critic alone say nothing about those of both
        components = () if critic_only else self.given  # they train the policy
        drawn = {one.name: one.draw() for one in components} if given is None else given
        step = RolloutStep(
            algorithm=self._config.algorithm,
            horizon=self._config.horizon,
            trains_critic_alone=critic_only,
            loss=self.loss,
            scorer=self.scorer,
            routers=self._routers,
            batch=batch,
            targets=targets,
            tokens_S=rollout_count(batch.rollout_N[targets.keep_N], batch.num_rollouts),
            rollouts=rollouts,
            rows=rows,
            is_first=is_first,
            update=self.num_updates,
            entropy_coef=self.entropy.weight(self._config.algorithm),
        )
        on_rollouts = TokenSet(
            batch=batch,
            rows=rows,
            terms=rollout_terms(step),
            temperature=self._config.rollout.temperature,
            keep_N=targets.keep_N,
            seen_N=seen_N,
        )
        others = [one.token_set(drawn[one.name], update=self.num_updates, routers=None) for one in components]
        stepped = self._stepper.make([on_rollouts, *others], lr=lr, critic_only=critic_only)

        def dump(judged: Attempt) -> None:
            attempt = replace(judged, rollouts=tuple(rollouts.tolist()), is_first=is_first)
            self.dump(attempt, batch, targets, drawn)

        metrics = self._finished(stepped, lr, dump)
        if metrics["loss/policy_tokens"] and not (critic_only or stepped.judgment.is_skipped):
            self.entropy = self.entropy.after(metrics["policy/entropy"], self._config.algorithm)
        return metrics

    def given_step(self, given: Mapping[str, StepBatch] | None = None, *, lr: float | None = None) -> dict[str, float]:
        """Make one step on the rows of components alone, unless the guard objects; a collective.

        given: rows by name, for a replay; None: the next ones. lr: None for that of the schedule. Raises as
        `optimizer_step`.
        """
        rate = self._learning_rate() if lr is None else lr
        drawn = {one.name: one.draw() for one in self.given} if given is None else given
        token_sets = [
            one.token_set(drawn[one.name], update=self.num_updates, routers=self._routers) for one in self.given
        ]
        stepped = self._stepper.make(token_sets, lr=rate)
        metrics = self._finished(stepped, rate, lambda attempt: self.dump(attempt, None, None, drawn))
        return metrics | self._health()

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
