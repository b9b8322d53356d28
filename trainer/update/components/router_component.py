"""Losses about the routers of the policy as a component, with the load of its experts and flipped routes.

The aux loss needs the load of the whole step before its first backward pass (trainer/objective/load_balance.py). It is
counted in one more forward pass over the rows, with the weights of this step. Without aux loss and z-loss only the load
is counted, which costs no pass. With replayed routes, the sets of experts are counted that the routers themselves would
not have chosen.

Dimensions: see trainer/objective/load_balance.py; _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.objective.load_balance import aux_terms, load_metrics, z_terms
from lockstep.trainer.update.components.component import Outputs, RolloutStep, Share, Term, mean_over
from lockstep.trainer.update.routers import Routers, load_at

LOAD = "router/load"
"""Name of the sums of (X, E) tokens per expert."""


def router_component(step: RolloutStep) -> Term:
    """Return the term of an optimizer step on the kept tokens of the rollouts; a collective."""
    keep_N = step.targets.keep_N
    return router_term(step.routers, step.batch, step.rows, keep_N, step.num_tokens, in_policy_loss=True)


def router_term(
    routers: Routers,
    batch: StepBatch,
    rows: Sequence[int],
    keep_N: Tensor,
    num_tokens: int,
    *,
    in_policy_loss: bool = False,
) -> Term:
    """Return the term of an optimizer step on the kept tokens of these rows (indices); a collective.

    num_tokens: number of those tokens. The share raises `TrainingError` if a router was not recorded that a loss needs.
    """
    fraction_E = routers.load_fractions(batch, rows, keep_N, num_tokens)

    def share(outputs: Outputs) -> Share:
        records, position_T = outputs.routers, outputs.position_T
        routers.refuse_missing(records)
        sums: dict[str, Tensor] = {}
        if routers.replayed is not None:
            sums["router/flipped_frac"] = routers.replayed.flipped(position_T).sum()
        if not records:
            return Share(loss_T=None, sums=sums)
        logits_XTE = [record.logits_LE[position_T] for record in records if record.logits_LE is not None]
        losses: list[Tensor] = []
        if fraction_E is not None:
            aux_T = aux_terms(logits_XTE, fraction_E)
            sums["router/aux_loss"] = aux_T.detach().sum()
            losses.append(routers.aux_coef * aux_T)
        if routers.z_coef:
            z_T = z_terms(logits_XTE)
            sums["router/z_loss"] = z_T.detach().sum()
            losses.append(routers.z_coef * z_T)
        sums[LOAD] = load_at(records, position_T)
        return Share(loss_T=torch.stack(losses).sum(0) if losses else None, sums=sums)

    def load(totals: Mapping[str, Tensor]) -> Mapping[str, float]:
        return load_metrics(totals[LOAD]) if LOAD in totals else {}

    return Term(
        name="router",
        weight=1.0,
        num_tokens=num_tokens,
        normalized=mean_over(num_tokens),
        share=share,
        in_policy_loss=in_policy_loss,
        more_metrics=load,
    )
