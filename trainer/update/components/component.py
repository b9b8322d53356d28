"""Components of the loss of an optimizer step: named sums over token sets, each with its own weight, mask and count.

    loss = Σ_c w_c · Σ_t l_ct / D_c        t over the tokens of component c, on all ranks

    Component  a function that gives the term of an optimizer step
    Term       a component in one optimizer step: its weight, mask and D_c are known before the first backward pass
    TokenSet   rows of an optimizer step, and the terms that are computed in their forward passes

Components over the rollouts share one token set and its forward passes; policy, KL, entropy and value loss also share
D_c (`algorithm.normalizer`), and are added per token before they are divided. A component with rows of its own
(`GivenRows`: demonstrations) adds a token set, whose packs are further microbatches of the same step. Every rank has
the numbers of all rows of a step, so D_c is counted over all of them, and no partition of the work can change it.

Dimensions: _N trained tokens of the token set's batch, _S its rollouts, _T those trained tokens of a microbatch that
the mask of the token set keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.layers.router_outputs import RouterOutput
from lockstep.trainer.objective.loss_normalization import StepCounts, loss_coefficients, normalized_loss
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.score.whole_step import ConfiguredLoss
from lockstep.trainer.update.routers import Routers

Normalized = Callable[[Tensor, Tensor], Tensor]
"""(T,) losses and rollouts of the tokens -> their share of the loss, a scalar; 0 with zero gradients without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outputs:
    """Forward pass of one microbatch, at the tokens that the mask keeps."""

    index_T: Tensor
    """Indices of the tokens in the batch, on the host."""
    rollout_T: Tensor
    position_T: Tensor
    """Positions in the pack from which the tokens are predicted."""
    sampling_logp_T: Tensor
    logp_T: Tensor
    """At the temperature of the token set."""
    entropy_T: Tensor
    values_T: Tensor
    """0 without a critic."""
    others: tuple[Tensor, ...] = ()
    """Further outputs of the module, for the arguments that the terms gave."""
    routers: Sequence[RouterOutput] = ()
    """Outputs of the routers of a mixture of experts, at all positions of the pack."""

    def at(self, values_N: Tensor) -> Tensor:
        """Return (T,) values of the tokens, as the logprobs are."""
        return values_N[self.index_T].to(self.logp_T.device, self.logp_T.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """Losses and sums of a term in one microbatch."""

    loss_T: Tensor | None
    """Without weight and D_c; None: nothing to train."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Detached; they add up over microbatches and ranks, to the `totals` of `Term.metrics`. Names and shapes are the
    same in every microbatch; no other term has these names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Term:
    """A component in one optimizer step."""

    name: str
    weight: float
    """At 0 the term is measured, but not trained."""
    num_tokens: int
    """Tokens of the component in the step, on all ranks."""
    normalized: Normalized
    """Divides by D_c; the losses of terms with the same function are added before."""
    share: Callable[[Outputs], Share]
    """Called with each microbatch, which may hold no token."""
    in_policy_loss: bool = False
    """True if `policy/loss` includes it."""
    arguments: Callable[[PackedBatch], Mapping[str, Any]] = lambda packed: {}
    """Returns further arguments for the module's forward pass of a microbatch."""
    more_metrics: Callable[[Mapping[str, Tensor]], Mapping[str, float]] = lambda totals: {}

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of the step, the scalars as means over its tokens.

        totals: its own sums over microbatches and ranks, float64, on the host.
        """
        means = {name: float(total) / max(self.num_tokens, 1) for name, total in totals.items() if total.ndim == 0}
        if (loss := means.get(f"loss/{self.name}")) is not None:
            means |= component_metrics(self.name, loss=loss, weight=self.weight, num_tokens=self.num_tokens)
        return {**means, **self.more_metrics(totals)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSet:
    """Rows of an optimizer step with their terms."""

    batch: StepBatch
    rows: Sequence[int]
    """Indices of rows of the batch, over all ranks."""
    terms: Sequence[Term]
    temperature: float = 1.0
    """Divides the logits."""
    keep_N: Tensor | None = None
    """Mask of the terms, on the host; None: all tokens."""
    seen_N: Tensor | None = None
    """(N,) logprobs of trained tokens of the batch, on the host; their NaN are replaced by those of the first forward
    pass on this rank."""

    def share(self, outputs: Outputs) -> tuple[Tensor, Sums]:
        """Return the loss of a microbatch, with weights and denominators, and its sums."""
        shares = {term: term.share(outputs) for term in self.terms}
        totals: dict[Normalized, Tensor] = {}
        for term, share in shares.items():
            if term.weight and share.loss_T is not None:
                loss_T = term.weight * share.loss_T
                totals[term.normalized] = totals[term.normalized] + loss_T if term.normalized in totals else loss_T
        losses = {normalizer: normalizer(loss_T, outputs.rollout_T) for normalizer, loss_T in totals.items()}
        zero = outputs.logp_T.new_zeros(())
        sums: dict[Reporter, Mapping[str, Tensor]] = {term: share.sums for term, share in shares.items()}
        if of_policy := {term.normalized for term in self.terms if term.in_policy_loss}:
            parts = [loss.detach() for normalizer, loss in losses.items() if normalizer in of_policy]
            sums[self] = {"policy/loss": sum(parts, start=zero)}
        return sum(losses.values(), start=zero), sums

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of the policy loss, with all components that it includes; empty without one."""
        if "policy/loss" not in totals:
            return {}
        loss, num_tokens = float(totals["policy/loss"]), self.terms[0].num_tokens
        return {"policy/loss": loss, **component_metrics("policy", loss=loss, weight=1.0, num_tokens=num_tokens)}


Reporter = Term | TokenSet
Sums = Mapping[Reporter, Mapping[str, Tensor]]
"""Sums, by name, of terms and token sets."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutStep:
    """The part of an optimizer step that is on rollouts."""

    algorithm: AlgorithmConfig
    horizon: int
    """Maximum completion length [tokens]."""
    trains_critic_alone: bool = False
    """True if the step leaves the policy as it is."""
    loss: ConfiguredLoss
    scorer: Scorer
    routers: Routers
    batch: StepBatch
    targets: Targets
    """Targets of these rollouts."""
    tokens_S: Tensor
    """Kept tokens of each rollout of the batch."""
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

    @property
    def num_tokens(self) -> int:
        """Kept tokens of the step."""
        return int(self.tokens_S[torch.from_numpy(self.rollouts)].sum())

    def term(self, name: str, share: Callable[[Outputs], Share], *, weight: float, **more: Any) -> Term:
        """Return a term of the policy loss with the configured normalizer."""
        return Term(
            name=name,
            weight=weight,
            num_tokens=self.num_tokens,
            normalized=self.normalized,
            share=share,
            in_policy_loss=True,
            **more,
        )

    def normalized(self, loss_T: Tensor, rollout_T: Tensor) -> Tensor:
        """Return the share of the loss by `algorithm.normalizer`."""
        counts = StepCounts(
            num_rollouts=len(self.rollouts),
            num_tokens=self.num_tokens,
            max_completion_length=self.horizon,
        )
        name, tokens_S = self.algorithm.normalizer, self.tokens_S.to(rollout_T.device)
        return normalized_loss(loss_T, loss_coefficients(name, rollout_T, tokens_S, counts, dtype=loss_T.dtype))


class GivenRows(Protocol):
    """A component that trains rows of its own beside the rollouts."""

    name: str
    cursor: int
    """Rows taken since the start of the run; saved in checkpoints."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the data; nothing on ranks other than 0."""
        ...

    def draw(self, stage: Callable[[str], AbstractContextManager[None]]) -> StepBatch:
        """Return the rows of the next optimizer step, one batch for all ranks; a collective. stage: times its parts."""
        ...

    def token_set(self, batch: StepBatch, *, update: int, routers: Routers | None) -> TokenSet:
        """Return rows from `draw` with their terms; a collective.

        update: number of updates done before this step. routers: to train their losses on the same tokens; None: not.
        """
        ...


def mean_over(num_tokens: int) -> Normalized:
    """Return the division by a number of tokens."""
    return lambda loss_T, rollout_T: loss_T.sum() / max(num_tokens, 1)


def component_metrics(name: str, *, loss: float, weight: float, num_tokens: int) -> dict[str, float]:
    """Return the metrics that every component has.

    * `loss/<name>`: its loss over the step, without its weight.
    * `loss/<name>_weight`: its weight in this update.
    * `loss/<name>_tokens`: number of its trained tokens, on all ranks.
    """
    return {f"loss/{name}": loss, f"loss/{name}_weight": weight, f"loss/{name}_tokens": float(num_tokens)}
