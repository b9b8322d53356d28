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

import torch
from torch import Tensor, nn

from rollout.errors import TrainingError
from trainer.batch.packing import PackedBatch
from trainer.batch.step_batch import StepBatch
from trainer.config.schema import Config
from trainer.model.layers.router_outputs import RouterOutput, RouterOutputs, router_coefs
from trainer.model.policy import Policy
from trainer.objective.load_balance import aux_terms, expert_load, fractions, z_terms
from trainer.score.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterTerms:
    """Share of a microbatch."""

    loss: Tensor | None
    """Weighted aux loss and z-loss; None if both are off."""
    sums: Mapping[str, Tensor]
    """Sums over tokens of each loss, not weighted, and of the share of layers with flipped routes."""
    load_XE: Tensor
    """Tokens per expert; (0, 0) in dense models."""


class RouterLoss:
    """Router losses of the trained module by the settings."""

    def __init__(self, module: nn.Module, scorer: Scorer, config: Config) -> None:
        """module: from `Distributed.prepare`. Raises `ConfigError` for settings that need a mixture of experts."""
        self._scorer = scorer
        algorithm = config.algorithm
        policy = next((part for part in module.modules() if isinstance(part, Policy)), None)
        self._replayed = policy.routing if policy and config.correction.routing_replay != "off" else None
        decoder = policy.causal_lm.get_decoder() if policy else None
        self._outputs = RouterOutputs(decoder) if decoder else None
        self._aux_coef, self._z_coef = router_coefs(decoder, algorithm) if decoder else (0.0, 0.0)

    @contextmanager
    def recorded(self) -> Iterator[list[RouterOutput]]:
        """Yield a list that receives the routers' outputs of the update's forward pass inside the block."""
        if self._outputs is None:
            yield []
            return
        with self._outputs.recorded(with_logits=bool(self._aux_coef or self._z_coef)) as records:
            yield records

    def fractions(self, batch: StepBatch, rows: Sequence[int], keep_N: Tensor, num_tokens: int) -> Tensor | None:
        """Return (E,) f of the kept tokens of these rows (indices), or None without aux loss; a collective.

        num_tokens: number of those tokens.
        """
        if self._outputs is None or not self._aux_coef:
            return None
        outputs = self._outputs

        def load(packed: PackedBatch) -> Tensor:
            with outputs.recorded(with_logits=False) as records:
                self._scorer.forward(packed)
            self._refuse_missing(records)
            kept = keep_N[packed.token_index_T].nonzero().squeeze(1)
            return _load(records, packed.target_index_T[kept.to(packed.target_index_T.device)])

        return fractions(self._scorer.total(batch, rows, load), num_tokens)

    def terms(
        self, records: Sequence[RouterOutput], positions_T: Tensor, fraction_E: Tensor | None, num_tokens: int
    ) -> RouterTerms:
        """Return the share of a microbatch.

        Args:
            records: of its forward pass.
            positions_T: positions in the pack from which its kept tokens are predicted.
            fraction_E: f of the step.
            num_tokens: kept tokens of the step.

        Raises `TrainingError` if a router was not recorded that a loss needs.
        """
        self._refuse_missing(records)
        sums: dict[str, Tensor] = {}
        if self._replayed is not None:
            sums["router/flipped_frac"] = self._replayed.flipped(positions_T).sum()
        if not records:
            return RouterTerms(loss=None, sums=sums, load_XE=torch.zeros(0, 0, dtype=torch.float64))
        logits_XTE = [record.logits_LE[positions_T] for record in records if record.logits_LE is not None]
        weighted: list[Tensor] = []
        if fraction_E is not None:
            sums["router/aux_loss"] = aux_terms(logits_XTE, fraction_E).sum()
            weighted.append(self._aux_coef * sums["router/aux_loss"])
        if self._z_coef:
            sums["router/z_loss"] = z_terms(logits_XTE).sum()
            weighted.append(self._z_coef * sums["router/z_loss"])
        loss = torch.stack(weighted).sum() / max(num_tokens, 1) if weighted else None
        return RouterTerms(loss=loss, sums=sums, load_XE=_load(records, positions_T))

    def _refuse_missing(self, records: Sequence[RouterOutput]) -> None:
        expected = self._outputs.num_routers if self._outputs and (self._aux_coef or self._z_coef) else 0
        if len(records) < expected:
            raise TrainingError(
                f"{len(records)} of {expected} routers ran as modules in a forward pass; expected all of them, because "
                "a loss reads their logits. The model computes its experts in another way (a fused kernel?); set "
                "algorithm.router_aux_coef=0 algorithm.router_z_coef=0"
            )


def _load(records: Sequence[RouterOutput], positions_T: Tensor) -> Tensor:
    """Return the (X, E) load by the tokens at these positions of the pack."""
    return expert_load([record.chosen_LK[positions_T] for record in records], records[0].num_experts)
