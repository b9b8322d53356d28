"""One optimizer step: forward and backward over the microbatches of all components, then the guard's verdict.

    token sets ─► packs of this rank ─► shares of all terms ─► backward ─► sums over ranks ─► guard ─► step, or skip

Each token set is assigned to ranks and packs by itself, with equally many packs on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.update.components.component import Outputs, Sums, TokenSet
from lockstep.trainer.update.routers import Routers
from lockstep.trainer.update.step_sums import StepSums
from lockstep.trainer.update.update_guard import Judgment, UpdateGuard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepped:
    """Outcome of one optimizer step."""

    judgment: Judgment
    """If it is skipped, nothing has changed."""
    sums: Mapping[str, float]
    """Sums of scalars over the step."""
    grad_norm: float
    metrics: Mapping[str, float]


class OptimizerStep:
    """Optimizer steps of the trained module."""

    def __init__(
        self,
        module: nn.Module,
        distributed: Distributed,
        scorer: Scorer,
        *,
        routers: Routers,
        guard: UpdateGuard,
        has_critic: bool,
    ) -> None:
        self._module = module
        self._distributed = distributed
        self._scorer = scorer
        self._routers = routers
        self._guard = guard
        self._has_critic = has_critic

    def make(self, token_sets: Sequence[TokenSet], *, lr: float, critic_only: bool = False) -> Stepped:
        """Make one step on these token sets, unless the guard objects; a collective.

        critic_only: leave the policy as it is.
        """
        budget = self._scorer.budget
        lengths = [int(tokens.batch.row_lengths[row]) for tokens in token_sets for row in tokens.rows]
        sums, plan_metrics = budget.attempt(
            partial(self._gradients, token_sets), lengths, discard=self._module.zero_grad
        )
        grad_norm = sums.gradient_norm(self._distributed)
        totals = sums.total(self._distributed)
        scalars = {
            name: float(total) for of_term in totals.values() for name, total in of_term.items() if total.ndim == 0
        }
        judgment = self._guard.judge(scalars, grad_norm)
        if judgment.is_skipped:
            self._distributed.discard_gradients()
        else:
            self._distributed.step(lr, grad_norm, critic_only=critic_only)
        metrics: dict[str, float] = {}
        for term, of_term in totals.items():
            metrics |= term.metrics(of_term)
        metrics |= {"optim/grad_norm": grad_norm, "optim/lr": lr, **plan_metrics}
        metrics["perf/token_budget"] = float(budget.tokens)
        return Stepped(judgment=judgment, sums=scalars, grad_norm=grad_norm, metrics=metrics)

    def _gradients(self, token_sets: Sequence[TokenSet], token_budget: int) -> tuple[StepSums, dict[str, float]]:
        """Run forward and backward of this rank's share; return its sums, and the metrics of the plan."""
        shares = [self._scorer.share(tokens.batch, tokens.rows, token_budget=token_budget) for tokens in token_sets]
        packs = [(tokens, pack) for tokens, share in zip(token_sets, shares, strict=True) for pack in share.packs]
        if self._distributed.world_size > 1 and not self._distributed.uses_deepspeed:
            # DDP reduces in it, so that all others may run out of memory: see `TokenBudget`
            packs.append((token_sets[0], ()))
        budget = self._scorer.budget
        sums = StepSums([one for tokens in token_sets for one in (*tokens.terms, tokens)])
        results: list[tuple[Tensor, Tensor, Tensor]] = []
        for number, (tokens, pack) in enumerate(packs):
            packed = self._scorer.packed(tokens.batch, pack)
            with self._distributed.accumulate(is_last=number == len(packs) - 1) as backward:
                loss, logp_T, microbatch_sums = budget.agreed(partial(self.loss, tokens, packed))
                # Ranks average gradients; the loss is a sum over them.
                budget.agreed(partial(backward, loss * self._distributed.world_size))
            # Results stay on the device until the last microbatch: a copy would wait for the kernels queued so far.
            if tokens.seen_N is not None:
                results.append((tokens.seen_N, packed.token_index_T, logp_T.detach().float()))
            for term, of_term in microbatch_sums.items():
                sums.add(term, of_term)
        for seen_N, index_T, logp_T in results:
            seen_N[index_T] = torch.where(seen_N[index_T].isnan(), logp_T.cpu(), seen_N[index_T])
        metrics = {**shares[0].metrics, "perf/microbatches": float(sum(len(share.packs) for share in shares))}
        return sums, metrics

    def loss(self, tokens: TokenSet, packed: PackedBatch) -> tuple[Tensor, Tensor, Sums]:
        """Return this microbatch's share of the step's loss, the logprobs of all its tokens, and its sums."""
        arguments = {name: value for term in tokens.terms for name, value in term.arguments(packed).items()}
        if self._has_critic:
            arguments["with_values"] = True
        with self._routers.recorded() as records:
            logp_T, entropy_T, *others = self._module(
                packed, temperature=tokens.temperature, with_entropy=True, **arguments
            )
        values_T = others.pop(0) if self._has_critic else torch.zeros_like(logp_T)
        index_T, selection = packed.token_index_T, slice(None)
        if tokens.keep_N is not None:
            indices = tokens.keep_N[index_T].nonzero().squeeze(1)  # on the host, where the size of the result is known
            index_T, selection = index_T[indices], indices.to(logp_T.device)
        outputs = Outputs(
            index_T=index_T,
            rollout_T=packed.rollout_T[selection],
            position_T=packed.target_index_T[selection],
            sampling_logp_T=packed.sampling_logprobs_T[selection],
            logp_T=logp_T[selection],
            entropy_T=entropy_T[selection],
            values_T=values_T[selection],
            others=tuple(other[selection] for other in others),
            routers=records,
        )
        loss, sums = tokens.share(outputs)
        # A pack without trained tokens still runs backward, through zeros: its rank takes part in every collective.
        return 0.0 * (logp_T.sum() + values_T.sum()) + loss, logp_T, sums
