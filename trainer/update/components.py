"""Components of the loss of an optimizer step: named sums over token sets, each with its own weight, mask and count.

    loss = Σ_c w_c · Σ_t l_ct / D_c        t over the tokens of component c, on all ranks

    TokenSet   rows of an optimizer step, and the terms that are computed in their forward passes
    Term       a component in one optimizer step: its weight, mask and D_c are known before the first backward pass

Components over the rollouts (`OnRollouts`: the policy loss, a divergence from a teacher) share one token set and its
forward passes. A component with rows of its own (`GivenRows`: demonstrations) adds a token set, whose packs are further
microbatches of the same step. Every rank
holds all rows of a step, so D_c is counted over all of them, and no partition of the work can change it.

Dimensions: _T trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.layers.router_outputs import RouterOutput
from lockstep.trainer.update.router_loss import RouterLoss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outputs:
    """Forward pass of one microbatch."""

    packed: PackedBatch
    logp_T: Tensor
    """At the temperature of the token set."""
    entropy_T: Tensor
    values_T: Tensor
    """0 without a critic."""
    others: tuple[Tensor, ...] = ()
    """Further outputs of the module, for the arguments that the terms gave."""
    routers: Sequence[RouterOutput] = ()
    """Outputs of the routers of a mixture of experts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """Loss and sums of a term in one microbatch."""

    loss: Tensor
    """Weighted and divided by D_c: shares of all microbatches and ranks add up to the loss."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached; they add up over microbatches and ranks, to the `totals` of `Term.metrics`. Names and shapes are the
    same in every microbatch; no other term has these names."""


class Term(Protocol):
    """A component in one optimizer step. Hashed by identity."""

    def arguments(self, packed: PackedBatch) -> Mapping[str, Any]:
        """Return further arguments for the module's forward pass of a microbatch."""
        ...

    def share(self, outputs: Outputs) -> Share:
        """Return the share of a microbatch, which may hold no trained token."""
        ...

    def metrics(self, totals: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return the metrics of the step. totals: its own sums over microbatches and ranks, float64, on the host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSet:
    """Rows of an optimizer step with their terms."""

    batch: StepBatch
    rows: Sequence[int]
    """Indices of rows of the batch, over all ranks."""
    terms: Sequence[Term]
    temperature: float = 1.0
    """Divides the logits."""
    seen_N: Tensor | None = None
    """(N,) logprobs of trained tokens of the batch, on the host; their NaN are replaced by those of the first forward
    pass on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutStep:
    """The part of an optimizer step that is on rollouts."""

    batch: StepBatch
    targets: Targets
    """Targets of these rollouts."""
    rollouts: np.ndarray
    """Indices."""
    rows: Sequence[int]
    """Indices of all rows of the rollouts, over all ranks."""
    is_first: bool
    """True if the old logprobs are still those of θ."""
    update: int
    """Number of updates done before this step."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in this step."""


class OnRollouts(Protocol):
    """A component over the trained tokens of the rollouts."""

    def term(self, step: RolloutStep) -> Term:
        """Return the term of an optimizer step, with its counts over all ranks; a collective."""
        ...


class GivenRows(Protocol):
    """A component that trains rows of its own beside the rollouts."""

    name: str
    cursor: int
    """Rows taken since the start of the run; saved in checkpoints."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the data; nothing on ranks other than 0."""
        ...

    def draw(self) -> StepBatch:
        """Return the rows of the next optimizer step, the same on every rank; a collective."""
        ...

    def token_set(self, batch: StepBatch, *, update: int, routers: RouterLoss | None) -> TokenSet:
        """Return rows from `draw` with their term.

        update: number of updates done before this step. routers: losses about routers to train on the same tokens;
        None: none.
        """
        ...


def component_metrics(name: str, *, loss: float, weight: float, num_tokens: int) -> dict[str, float]:
    """Return the metrics that every component has.

    * `loss/<name>`: its loss over the step, without its weight.
    * `loss/<name>_weight`: its weight in this update.
    * `loss/<name>_tokens`: number of its trained tokens, on all ranks.
    """
    return {f"loss/{name}": loss, f"loss/{name}_weight": weight, f"loss/{name}_tokens": float(num_tokens)}
