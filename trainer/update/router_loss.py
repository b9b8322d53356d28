"""Losses about the routers of the policy, the load of its experts, and flipped routes, in an optimizer step.

The aux loss needs the load of the whole step before its first backward pass (trainer/objective/load_balance.py). It is
counted in one more forward pass over the rows, with the weights of this step. Dense models have no routers and nothing
is computed for them; without aux loss and z-loss only the load is counted, which costs no pass. With replayed routes,
the sets of experts are counted that the routers themselves would not have chosen.

Dimensions: see trainer/objective/load_balance.py; _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.layers.router_outputs import RouterOutput, RouterOutputs, router_coefs
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.load_balance import aux_terms, expert_load, fractions, load_metrics, z_terms
from lockstep.trainer.score.scorer import Scorer

LOAD = "router/load"
"""Name of the sums of (X, E) tokens per expert."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterShare:
    """Share of a microbatch."""

    loss: Tensor | None
    """Weighted aux loss and z-loss; None if both are off."""
    sums: Mapping[str, Tensor]
    """Sums over tokens of each loss, not weighted, of the share of layers with flipped routes, and of the load. Empty
    in dense models."""


class RouterLoss:
    """Router losses of the trained module by the settings."""

    def __init__(self, module: nn.Module, scorer: Scorer, config: Config) -> None:
        """module: from `Distributed.prepare`. Raises `ConfigError` for settings that need a mixture of experts."""
        self._scorer = scorer
        algorithm = config.algorithm
        policy = next((part for part in module.modules() if isinstance(part, Policy)), None)
        self.replayed = policy.routing if policy and config.correction.routing_replay != "off" else None
        decoder = policy.causal_lm.get_decoder() if policy else None
        self.outputs = RouterOutputs(decoder) if decoder else None
        self.aux_coef, self.z_coef = router_coefs(decoder, algorithm) if decoder else (0.0, 0.0)

    @contextmanager
    def recorded(self) -> Iterator[list[RouterOutput]]:
        """Yield a list that receives the routers' outputs of the update's forward pass inside the block."""
        if self.outputs is None:
            yield []
            return
        with self.outputs.recorded(with_logits=bool(self.aux_coef or self.z_coef)) as records:
            yield records

    def opened(self, batch: StepBatch, rows: Sequence[int], keep_N: Tensor, num_tokens: int) -> RouterStep:
        """Return the router losses of an optimizer step on the kept tokens of these rows (indices); a collective.

        num_tokens: number of those tokens.
        """
        fraction_E = None
        if self.outputs is not None and self.aux_coef:
            load_XE = self._scorer.total(batch, rows, partial(self._load, keep_N))
            fraction_E = fractions(load_XE, num_tokens)
        return RouterStep(routers=self, fraction_E=fraction_E, num_tokens=num_tokens)

    def refuse_missing(self, records: Sequence[RouterOutput]) -> None:
        """Raise `TrainingError` if a router was not recorded that a loss needs."""
        expected = self.outputs.num_routers if self.outputs and (self.aux_coef or self.z_coef) else 0
        if len(records) < expected:
            raise TrainingError(
                f"{len(records)} of {expected} routers ran as modules in a forward pass; expected all of them, because "
                "a loss reads their logits. The model computes its experts in another way (a fused kernel?); set "
                "algorithm.router_aux_coef=0 algorithm.router_z_coef=0"
            )

    def _load(self, keep_N: Tensor, packed: PackedBatch) -> Tensor:
        assert self.outputs is not None
        with self.outputs.recorded(with_logits=False) as records:
            self._scorer.forward(packed)
        self.refuse_missing(records)
        kept = keep_N[packed.token_index_T].nonzero().squeeze(1)
        return _load(records, packed.target_index_T[kept.to(packed.target_index_T.device)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterStep:
    """Router losses of one optimizer step."""

    routers: RouterLoss
    fraction_E: Tensor | None
    """f of the step; None without aux loss."""
    num_tokens: int
    """Kept tokens of the step."""

    def share(self, records: Sequence[RouterOutput], positions_T: Tensor) -> RouterShare:
        """Return the share of a microbatch.

        Args:
            records: of its forward pass.
            positions_T: positions in the pack from which its kept tokens are predicted.

        Raises `TrainingError` if a router was not recorded that a loss needs.
        """
        self.routers.refuse_missing(records)
        sums: dict[str, Tensor] = {}
        if self.routers.replayed is not None:
            sums["router/flipped_frac"] = self.routers.replayed.flipped(positions_T).sum()
        if not records:
            return RouterShare(loss=None, sums=sums)
        logits_XTE = [record.logits_LE[positions_T] for record in records if record.logits_LE is not None]
        weighted: list[Tensor] = []
        if self.fraction_E is not None:
            sums["router/aux_loss"] = aux_terms(logits_XTE, self.fraction_E).sum()
            weighted.append(self.routers.aux_coef * sums["router/aux_loss"])
        if self.routers.z_coef:
            sums["router/z_loss"] = z_terms(logits_XTE).sum()
            weighted.append(self.routers.z_coef * sums["router/z_loss"])
        loss = torch.stack(weighted).sum() / max(self.num_tokens, 1) if weighted else None
        return RouterShare(loss=loss, sums={**sums, LOAD: _load(records, positions_T)})

    def metrics(self, totals: Mapping[str, Tensor]) -> dict[str, float]:
        """Return metrics of the load. totals: sums of the step."""
        return load_metrics(totals[LOAD]) if LOAD in totals else {}


def _load(records: Sequence[RouterOutput], positions_T: Tensor) -> Tensor:
    """Return the (X, E) load by the tokens at these positions of the pack."""
    return expert_load([record.chosen_LK[positions_T] for record in records], records[0].num_experts)
