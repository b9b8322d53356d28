"""Routers of the policy in a forward pass, none in dense models: their outputs, and the load of the experts.

Dimensions: see trainer/objective/load_balance.py; _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from lockstep.rollout.errors import TrainingError
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.model.layers.router_outputs import RouterOutput, RouterOutputs, router_coefs
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.scorer import Scorer


class Routers:
    """Routers of the trained module, with the settings of their losses."""

    def __init__(self, module: nn.Module, scorer: Scorer, algorithm: AlgorithmConfig, *, replays: bool) -> None:
        """module: from `Distributed.prepare`. replays: True if rows may carry experts to compute with.

        Raises `ConfigError` for settings that need a mixture of experts.
        """
        self._scorer = scorer
        policy = next((part for part in module.modules() if isinstance(part, Policy)), None)
        self.replayed = policy.routing if policy and replays else None
        decoder = policy.causal_lm.get_decoder() if policy else None
        self.outputs = RouterOutputs(decoder) if decoder else None
        self.aux_coef, self.z_coef = router_coefs(decoder, algorithm) if decoder else (0.0, 0.0)

    @property
    def exist(self) -> bool:
        """False for a dense model."""
        return self.replayed is not None or bool(self.outputs and self.outputs.num_routers)

    @contextmanager
    def recorded(self) -> Iterator[list[RouterOutput]]:
        """Yield a list that receives the routers' outputs of the update's forward pass inside the block."""
        if self.outputs is None:
            yield []
            return
        with self.outputs.recorded(with_logits=bool(self.aux_coef or self.z_coef)) as records:
            yield records

    def load_fractions(self, batch: StepBatch, rows: Sequence[int], keep_N: Tensor, num_tokens: int) -> Tensor | None:
        """Return (E,) the fraction f of the aux loss, over the kept tokens of these rows; a collective. None without
        aux loss. num_tokens: number of those tokens."""
        if self.outputs is None or not self.aux_coef:
            return None
        from lockstep.trainer.objective.load_balance import fractions  # updates of dense models do not load it

        return fractions(self._scorer.total(batch, rows, partial(self._load, keep_N)), num_tokens)

    def refuse_missing(self, records: Sequence[RouterOutput]) -> None:
        """Raise `TrainingError` if a router was not recorded that a loss needs."""
        total = self.outputs.num_routers if self.outputs and (self.aux_coef or self.z_coef) else 0
        if len(records) < total:
            raise TrainingError(
                f"{len(records)} of {total} routers ran as modules in a forward pass; expected all of them, because "
                "a loss reads their logits. The model computes its experts in another way (a fused kernel?); set "
                "algorithm.router_aux_coef=0 algorithm.router_z_coef=0"
            )

    def _load(self, keep_N: Tensor, packed: PackedBatch) -> Tensor:
        assert self.outputs is not None
        with self.outputs.recorded(with_logits=False) as records:
            self._scorer.forward(packed)
        self.refuse_missing(records)
        indices = keep_N[packed.token_index_T].nonzero().squeeze(1)
        return load_at(records, packed.target_index_T[indices.to(packed.target_index_T.device)])


def load_at(records: Sequence[RouterOutput], position_T: Tensor) -> Tensor:
    """Return the (X, E) load by the tokens at these positions of the pack."""
    from lockstep.trainer.objective.load_balance import expert_load

    return expert_load([record.chosen_LK[position_T] for record in records], records[0].num_experts)
