"""Update of the policy on the rows of a step: minibatches, packs, microbatches, one denominator.

`Targets` holds advantages, correction weights and old logprobs of all trained tokens of the step; a microbatch selects
its own by `PackedBatch.token_index_T`. So a token's targets do not depend on its pack, and only sums of per-token
losses reach the framework.

Dimensions: _S rollouts of the step, _N trained tokens of the step, _T trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from trainer.batch.packing import PackedBatch, collate, whole_row
from trainer.batch.step_batch import StepBatch
from trainer.config.schema import Config
from trainer.credit.old_policy import FromEngine
from trainer.credit.targets import Targets
from trainer.distributed.distributed import Distributed
from trainer.objective.kl import kl_term
from trainer.objective.load_balance import load_metrics
from trainer.objective.loss_normalization import StepCounts, loss_coefficients, normalized_loss
from trainer.objective.losses.inputs import LossInputs
from trainer.objective.own.lookup import policy_loss_named
from trainer.objective.per_rollout import rollout_count, rollout_mean
from trainer.objective.value_loss import clipped_value_loss
from trainer.score.scorer import Scorer
from trainer.update.batch_dumps import Attempt
from trainer.update.router_loss import RouterLoss
from trainer.update.schedule import learning_rate
from trainer.update.update_guard import UpdateGuard

PPO_NAMES = {"approxkl": "policy/approx_kl", "clipfrac": "policy/clip_frac", "entropy": "policy/entropy"}
"""Names of metrics in the PPO literature, reported with a critic."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Updated:
    """Outcome of the optimizer steps on one rollout batch."""

    metrics: Mapping[str, float]
    """Means over the optimizer steps that were made, or over the skipped ones if all were."""
    logp_N: Tensor
    """Logprobs of the trained tokens in their first forward pass of the update."""


class Updater:
    """The trained module with its optimizer steps and its scorer."""

    def __init__(self, module: nn.Module, distributed: Distributed, config: Config) -> None:
        self._module = module
        self._distributed = distributed
        self._config = config
        loss = policy_loss_named(config.algorithm.loss)
        self._loss = loss.configured(config.algorithm)
        self._sequence_values = loss.sequence_values(config.algorithm)
        self._has_critic = config.has_critic
        self.scorer = Scorer(
            module,
            distributed,
            temperature=config.rollout.temperature,
            token_budget=config.pack_tokens,
            share_prefixes=config.share_prefixes,
        )
        self._routers = RouterLoss(module, self.scorer, config.algorithm)
        self.num_updates = 0
        """Number of optimizer steps done; the version of the weights."""
        self.guard = UpdateGuard(config.optimizer)
        self.dump: Callable[[Attempt, StepBatch, Targets], None] = lambda attempt, batch, targets: None
        """Callback that saves the batch of an optimizer step that the guard objects to; called on every rank."""

    def update(self, batch: StepBatch, targets: Targets) -> Updated:
        """Run all epochs and minibatches of one rollout batch; a collective."""
        made: list[dict[str, float]] = []
        skipped: list[dict[str, float]] = []
        seen_N = torch.full((batch.layout.num_tokens,), torch.nan)
        settings = self._config.optimizer
        lr = learning_rate(  # one for all epochs and minibatches of a rollout batch
            self.num_updates,
            peak=settings.peak_lr,
            schedule=settings.schedule,
            warmup_updates=settings.warmup_updates,
            total_updates=self._config.updates,
            final_fraction=settings.final_lr_fraction,
        )
        for rollouts in self._minibatches(batch.num_rollouts):
            if len(rollouts):
                own = targets.for_rollouts(torch.from_numpy(rollouts), self._config.algorithm)
                before = self.num_updates
                report = self.optimizer_step(batch, own, rollouts, seen_N, lr=lr, is_first=not made and not skipped)
                (made if self.num_updates > before else skipped).append(report)
        seen_N = self._distributed.sum(seen_N.nan_to_num())
        reports = made or skipped
        means = {name: float(np.mean([r[name] for r in reports])) for name in reports[0]} if reports else {}
        means["health/skipped_updates"] = float(self.guard.skipped)
        return Updated(metrics=means, logp_N=seen_N)

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return log π(ids[i] | ids[:i]) at temperature 1 for i ≥ 1, by the trainer's own forward; a collective."""
        packed = collate([whole_row(ids)], [0], device=self._distributed.device)
        with torch.no_grad():
            logp_T, *_ = self._module(packed, temperature=1.0, with_entropy=False)
        return logp_T.float().tolist()

    # One optimizer step

    def optimizer_step(
        self, batch: StepBatch, targets: Targets, rollouts: np.ndarray, seen_N: Tensor, *, lr: float, is_first: bool
    ) -> dict[str, float]:
        """Make one step on these rollouts (indices), unless the guard objects; a collective.

        Args:
            targets: of these rollouts.
            seen_N: (N,) logprobs so far; the NaN of tokens in this step are replaced by their logprobs.
            is_first: True if the old logprobs are still those of θ.

        Raises `TrainingError` on all ranks after too many skipped steps in a row.
        """
        chosen = np.isin(batch.layout.rollout_index, rollouts)
        rows = np.flatnonzero(chosen).tolist()
        counts, tokens_S = self._counts(batch, targets, rollouts)
        seq_log_ratio_S = self._sequence_log_ratio(batch, targets, rows, is_first=is_first)
        fraction_E = self._routers.fractions(batch, rows, targets.keep_N, counts.num_tokens)
        budget = self.scorer.budget

        def gradients(token_budget: int) -> tuple[dict[str, float], Tensor, dict[str, float]]:
            """Run forward and backward of this rank's share; return its sums, expert load, and the plan's metrics."""
            share = self.scorer.plan(batch, rows, token_budget=token_budget)
            sums: dict[str, Tensor] = {}
            loads: list[Tensor] = []
            logprobs: list[tuple[Tensor, Tensor]] = []
            packs = list(share.microbatches[self._distributed.rank])
            if self._distributed.world_size > 1 and not self._distributed.uses_deepspeed:
                packs.append(())  # DDP reduces in it, so that all others may run out of memory: see `TokenBudget`
            for number, pack in enumerate(packs):
                packed = self.scorer.packed(batch, pack)
                forward = partial(self._microbatch_loss, packed, targets, counts, tokens_S, seq_log_ratio_S, fraction_E)
                with self._distributed.accumulate(is_last=number == len(packs) - 1) as backward:
                    loss, logp_T, microbatch_sums, load_XE = budget.agreed(forward)
                    # Ranks average gradients; the loss is a sum over them.
                    budget.agreed(partial(backward, loss * self._distributed.world_size))
                # Results stay on the device until the last microbatch: a copy would wait for the kernels queued so far.
                logprobs.append((packed.token_index_T, logp_T.detach().float()))
                loads.append(load_XE)
                for name, value in microbatch_sums.items():
                    sums[name] = sums.get(name, 0.0) + value.detach().double()
            for index_T, logp_T in logprobs:
                seen_N[index_T] = torch.where(seen_N[index_T].isnan(), logp_T.cpu(), seen_N[index_T])
            totals = torch.stack(list(sums.values())).tolist() if sums else []
            return dict(zip(sums, totals, strict=True)), torch.stack(loads).sum(0), share.metrics()

        sums, load_XE, share_metrics = budget.attempt(
            gradients, [len(batch.rows[row]) for row in rows], discard=self._module.zero_grad
        )
        names = sorted(sums)
        totals = self._distributed.sum(torch.tensor([sums[name] for name in names], dtype=torch.float64)).tolist()
        grad_norm = self._distributed.gradient_norm()
        step_sums = dict(zip(names, totals, strict=True))
        judgment = self.guard.judge(step_sums, grad_norm)
        if judgment.reason is not None:
            attempt = Attempt(
                update=self.num_updates + 1,
                number=self.guard.in_a_row,
                rollouts=tuple(rollouts.tolist()),
                lr=lr,
                is_first=is_first,
                reason=judgment.reason,
                sums=step_sums,
                grad_norm=grad_norm,
            )
            self.dump(attempt, batch, targets)
        if judgment.is_skipped:
            self._distributed.discard_gradients()
            self.guard.raise_after_repeated_skips(self.num_updates + 1, judgment)
        else:
            self._distributed.step(lr, grad_norm)
            self.num_updates += 1
        means = {
            name: total if name == "policy/loss" else total / max(counts.num_tokens, 1)
            for name, total in step_sums.items()
        }
        ppo = {f"ppo/policy/{name}": means[found] for name, found in PPO_NAMES.items() if found in means}
        return {
            **means,
            **(ppo if self._has_critic else {}),
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            **load_metrics(self._distributed.sum(load_XE) if load_XE.numel() else load_XE),
            **share_metrics,
            "perf/token_budget": float(budget.tokens),
        }

    def _microbatch_loss(
        self,
        packed: PackedBatch,
        targets: Targets,
        counts: StepCounts,
        tokens_S: Tensor,
        seq_log_ratio_S: Tensor | None,
        fraction_E: Tensor | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
        """Return this microbatch's share of the step's loss, its logprobs, sums for metrics, and expert load."""
        algorithm = self._config.algorithm
        with self._routers.recorded() as records:
            logp_T, entropy_T, values_T = self._forward(packed)
        keep_T = targets.keep_N[packed.token_index_T]
        kept_index_T = packed.token_index_T[keep_T]

        def at_tokens(values_N: Tensor) -> Tensor:
            return values_N[kept_index_T].to(logp_T.device, logp_T.dtype)

        keep = keep_T.nonzero().squeeze(1).to(logp_T.device)  # indices: the size of a mask's result is on the device
        rollout_T = packed.rollout_T[keep]
        old_T = targets.old.at(kept_index_T, logp_T[keep])
        weights_T = targets.correction.weights_at(kept_index_T, old_T, packed.sampling_logprobs_T[keep])
        outputs = self._loss(
            LossInputs(
                logp_T=logp_T[keep],
                old_logp_T=old_T,
                advantages_T=at_tokens(targets.advantages_N),
                rollout_T=rollout_T,
                num_rollouts=len(tokens_S),
                weights_T=weights_T,
                seq_log_ratio_S=seq_log_ratio_S,
            )
        )
        loss_T, metrics = outputs.loss_T, dict(outputs.metrics)
        if targets.ref_logp_N is not None and algorithm.kl_place == "loss":
            kl_T = kl_term(algorithm.kl_estimator, logp_T[keep], at_tokens(targets.ref_logp_N), old_T)
            loss_T = loss_T + algorithm.kl_coef * kl_T
        if algorithm.entropy_coef:
            loss_T = loss_T - algorithm.entropy_coef * entropy_T[keep]
        if targets.credit is not None and targets.returns_N is not None:
            value_loss = clipped_value_loss(
                values_T[keep],
                at_tokens(targets.credit.values_N),
                at_tokens(targets.returns_N),
                clip=algorithm.value_clip,
            )
            metrics |= {**value_loss.metrics, "ppo/policy/loss": outputs.loss_T.detach().sum()}
            loss_T = loss_T + algorithm.value_coef * value_loss.loss_T
        coefficient_T = loss_coefficients(
            algorithm.normalizer, rollout_T, tokens_S.to(rollout_T.device), counts, dtype=loss_T.dtype
        )
        # A pack without trained tokens still runs backward, through zeros: its rank takes part in every collective.
        loss = normalized_loss(loss_T, coefficient_T) + 0.0 * (logp_T.sum() + values_T.sum())
        router = self._routers.terms(records, packed.target_index_T[keep], fraction_E, counts.num_tokens)
        if router.loss is not None:
            loss = loss + router.loss
        metrics |= {"policy/entropy": entropy_T[keep].detach().sum(), "policy/loss": loss.detach(), **router.sums}
        return loss, logp_T, metrics, router.load_XE

    def _forward(self, packed: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return logp_T, entropy_T and values_T, which are 0 without a critic."""
        temperature = self._config.rollout.temperature
        if not self._has_critic:
            logp_T, entropy_T = self._module(packed, temperature=temperature, with_entropy=True)
            return logp_T, entropy_T, torch.zeros_like(logp_T)
        return self._module(packed, temperature=temperature, with_entropy=True, with_values=True)

    def _counts(self, batch: StepBatch, targets: Targets, rollouts: np.ndarray) -> tuple[StepCounts, Tensor]:
        """Return the denominators and tokens per rollout of this optimizer step, equal on all ranks."""
        kept_S = rollout_count(batch.rollout_N[targets.keep_N], batch.num_rollouts)
        counts = StepCounts(
            num_rollouts=len(rollouts),
            num_tokens=int(kept_S[torch.from_numpy(rollouts)].sum()),
            max_completion_length=self._config.horizon,
        )
        return counts, kept_S

    def _sequence_log_ratio(
        self, batch: StepBatch, targets: Targets, rows: Sequence[int], *, is_first: bool
    ) -> Tensor | None:
        """Return the (S,) log ratio for losses with one per rollout; in the first update of a batch θ is θ_old."""
        if self._sequence_values is None:
            return None
        kept, old_N = targets.keep_N, targets.old.logp_N
        if is_first and not isinstance(targets.old, FromEngine):
            log_ratio_N = torch.zeros(batch.layout.num_tokens)
        else:
            assert old_N is not None, "only the first update of a batch may use its own logprobs as the old ones"
            log_ratio_N = self.scorer.score(batch, rows) - old_N
        values = self._sequence_values(log_ratio_N[kept], targets.advantages_N[kept])
        ratio_S = rollout_mean(values, batch.rollout_N[kept], batch.num_rollouts)
        return ratio_S.to(self._distributed.device)

    # Partition of the work

    def _minibatches(self, num_rollouts: int) -> Iterator[np.ndarray]:
        """Yield the rollout indices of each optimizer step: a permutation per epoch, cut into equal parts."""
        algorithm = self._config.algorithm
        for epoch in range(algorithm.epochs):
            if algorithm.minibatches == 1:
                yield np.arange(num_rollouts)
                continue
            order = np.random.default_rng([self._config.seed, self.num_updates, epoch]).permutation(num_rollouts)
            yield from np.array_split(order, algorithm.minibatches)
