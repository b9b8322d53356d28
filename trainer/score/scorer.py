"""Log-probabilities of a step's rows under one model, computed by all ranks together.

Used for the policy before its update, for the reference, and for the policy in another packing (the noise floor).

Shape legend: _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from trainer.batch.assignment import Plan, plan
from trainer.batch.packing import PackedBatch, collate
from trainer.batch.prefix_bundles import plan_bundles
from trainer.batch.step_batch import StepBatch
from trainer.distributed.distributed import Distributed
from trainer.model import isolation
from trainer.model.decoder import can_share_prefixes
from trainer.model.policy import Policy
from trainer.score.token_budget import TokenBudget


class Scorer:
    """One model with the packing of its rows."""

    def __init__(
        self,
        module: nn.Module,
        distributed: Distributed,
        *,
        temperature: float,
        token_budget: int,
        share_prefixes: str = "auto",
    ) -> None:
        """module: policy from `Distributed.prepare` or `prepare_frozen`. share_prefixes: the setting."""
        self._module = module
        self._distributed = distributed
        self._temperature = temperature
        self._shares_prefixes = share_prefixes != "never" and can_share_prefixes(module)
        self.budget = TokenBudget(token_budget, distributed)

    def plan(self, batch: StepBatch, rows: Sequence[int], *, token_budget: int | None = None) -> Plan:
        """Assign rows (indices) to ranks and packs."""
        num_ranks, budget = self._distributed.world_size, token_budget or self.budget.tokens
        if self._shares_prefixes:
            share = plan_bundles([batch.rows[row].ids for row in rows], num_ranks=num_ranks, token_budget=budget)
        else:
            share = plan([len(batch.rows[row]) for row in rows], num_ranks=num_ranks, token_budget=budget)
        return replace(
            share,
            microbatches=tuple(tuple(tuple(rows[i] for i in pack) for pack in packs) for packs in share.microbatches),
        )

    def packed(self, batch: StepBatch, pack: Sequence[int]) -> PackedBatch:
        """Collate the rows of a pack from `plan`, on the device."""
        return collate(
            batch.rows, pack, batch.layout, share_prefixes=self._shares_prefixes, device=self._distributed.device
        )

    def forward(self, packed: PackedBatch, **arguments: bool) -> tuple[Tensor, ...]:
        """Run the module on a pack without entropy. arguments: further ones of its forward."""
        return self._module(packed, temperature=self._temperature, with_entropy=False, **arguments)

    def score(self, batch: StepBatch, rows: Sequence[int] | None = None, *, token_budget: int | None = None) -> Tensor:
        """Return (N,) float32 logprobs of trained tokens, 0 outside of `rows` (default: all); a collective."""
        chosen = range(len(batch.rows)) if rows is None else rows
        return self._run(batch, chosen, token_budget, with_values=False)[0]

    def score_with_values(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Return (N,) logprobs and values, from one pass of a module with a critic; a collective."""
        logp_N, values_N = self._run(batch, range(len(batch.rows)), None, with_values=True)
        return logp_N, values_N

    def _run(
        self, batch: StepBatch, rows: Sequence[int], token_budget: int | None, *, with_values: bool
    ) -> tuple[Tensor, ...]:
        forward = partial(self._scores, with_values=with_values)

        def all_packs(token_budget: int) -> Tensor:
            packs = self.plan(batch, rows, token_budget=token_budget).microbatches[self._distributed.rank]
            outputs_N = torch.zeros(1 + with_values, batch.layout.num_tokens)
            outputs: list[tuple[Tensor, Tensor]] = []
            for pack in packs:
                packed = self.packed(batch, pack)
                outputs.append((packed.token_index_T, self.budget.agreed(partial(forward, packed))))
            for index_T, output_T in outputs:  # after all passes, because a copy to the host waits for the device
                outputs_N[:, index_T] = output_T.cpu()
            return outputs_N

        lengths = [len(batch.rows[row]) for row in rows]
        with torch.no_grad():
            outputs_N = self.budget.attempt(all_packs, lengths, at_most=token_budget)
        # Each token was scored on one rank, the others hold 0.
        return tuple(self._distributed.sum(outputs_N))

    def _scores(self, packed: PackedBatch, *, with_values: bool) -> Tensor:
        """Return (1, T) logprobs, or (2, T) logprobs and values."""
        arguments = {"with_values": True} if with_values else {}
        logp_T, _, *values_T = self.forward(packed, **arguments)
        return torch.stack([output_T.float() for output_T in (logp_T, *values_T)])

    def refuse_leaks(self, policy: Policy, *, dtype: torch.dtype, with_values: bool) -> None:
        """Raise `ConfigError` if rows of a pack can see each other; a collective.

        policy: the one inside the module. dtype: of the computation.
        """
        isolation.check(
            partial(self._scores, with_values=with_values),
            vocab_size=policy.vocab_size,
            name=type(policy.causal_lm).__name__,
            dtype=dtype,
            device=self._distributed.device,
        )

    def total(self, batch: StepBatch, rows: Sequence[int], measure: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Return the sum of `measure(packed)` over the packs of all ranks, without gradients; a collective.

        measure: calls `forward` once, and returns a tensor of one shape.
        """

        def all_packs(token_budget: int) -> Tensor:
            packs = self.plan(batch, rows, token_budget=token_budget).microbatches[self._distributed.rank]
            measured = [self.budget.agreed(partial(measure, self.packed(batch, pack))) for pack in packs]
            return torch.stack(measured).sum(0)

        with torch.no_grad():
            measured = self.budget.attempt(all_packs, [len(batch.rows[row]) for row in rows])
        return self._distributed.sum(measured)

    def score_repacked(self, batch: StepBatch) -> Tensor:
        """Score with the smallest possible packs, about one row each; a collective."""
        return self.score(batch, token_budget=max(map(len, batch.rows), default=1))
