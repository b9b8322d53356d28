"""Log-probabilities of a step's rows under one model, the work shared by all ranks.

Used for the policy before it is updated, for the reference, and for the policy a second time in another packing,
which shows how much of a difference is only rounding.

Shape legend: _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.balance import Plan, plan
from trainer.batch import StepBatch
from trainer.distributed import Distributed
from trainer.packing import collate


class Scorer:
    """One model and how its rows are packed."""

    def __init__(self, module: nn.Module, distributed: Distributed, *, temperature: float, token_budget: int) -> None:
        """module: a policy, as `Distributed.prepare` or `prepare_frozen` returned it."""
        self._module = module
        self._distributed = distributed
        self._temperature = temperature
        self._token_budget = token_budget

    def plan(self, batch: StepBatch, rows: Sequence[int], *, token_budget: int | None = None) -> Plan:
        """Which rank computes which of these rows, in which pack."""
        share = plan(
            [len(batch.rows[row]) for row in rows],
            num_ranks=self._distributed.world_size,
            token_budget=token_budget or self._token_budget,
        )
        of_batch = tuple(tuple(tuple(rows[i] for i in pack) for pack in packs) for packs in share.microbatches)
        return replace(share, microbatches=of_batch)

    def score(self, batch: StepBatch, rows: Sequence[int] | None = None, *, token_budget: int | None = None) -> Tensor:
        """(N,) float32 logprobs of the trained tokens of these rows (by default all), 0 elsewhere; a collective."""
        chosen = range(len(batch.rows)) if rows is None else rows
        packs = self.plan(batch, chosen, token_budget=token_budget).microbatches[self._distributed.rank]
        logp_N = torch.zeros(batch.layout.num_tokens)
        with torch.no_grad():
            for pack in packs:
                packed = collate(batch.rows, pack, batch.layout, device=self._distributed.device)
                logp_T, _ = self._module(packed, temperature=self._temperature, with_entropy=False)
                logp_N[packed.token_index_T.cpu()] = logp_T.float().cpu()
        return self._distributed.sum(logp_N)  # each token was scored on one rank, the others hold 0

    def score_repacked(self, batch: StepBatch) -> Tensor:
        """(N,) the same as `score`, with every row in as small a pack as there is: about one row each; a collective."""
        return self.score(batch, token_budget=max(map(len, batch.rows), default=1))
