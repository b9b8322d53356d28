"""Log-probabilities of a step's rows under one model, computed by all ranks together.

Used for the policy before its update, for the reference, and for the policy in another packing (the noise floor).

Shape legend: _N trained tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.trainer.batch.assignment import Plan, RankShare, plan
from lockstep.trainer.batch.packing import PackedBatch, collate, row_places
from lockstep.trainer.batch.prefix_bundles import plan_bundles
from lockstep.trainer.batch.prefixes import token_keys
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.decoder import can_share_prefixes
from lockstep.trainer.model.layers.rotary import longest_shared
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks import isolation, layer_precision
from lockstep.trainer.score.token_budget import TokenBudget

if TYPE_CHECKING:
    from lockstep.trainer.batch.packed_images import ImageSource


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
        with_routes: bool = True,
        images: ImageSource | None = None,
    ) -> None:
        """module: policy from `Distributed.prepare` or `prepare_frozen`. share_prefixes: the setting.

        with_routes: False for a model that chooses its experts itself, although the rows carry routes.
        images: of the rows; None for a model that sees none.
        """
        self._module = module
        self._distributed = distributed
        self._temperature = temperature
        self._with_routes = with_routes
        self._images = images
        shares = share_prefixes != "never" and can_share_prefixes(module)
        self._longest_shared = longest_shared(module) if shares else 0
        self.budget = TokenBudget(token_budget, distributed)

    def share(self, batch: StepBatch, rows: Sequence[int], *, token_budget: int | None = None) -> RankShare:
        """Assign rows (indices) to ranks and packs; return this rank's. A collective, if rows are dealt to ranks."""
        return batch.share(partial(self._plan, batch, rows, token_budget), self._distributed)

    def _plan(self, batch: StepBatch, rows: Sequence[int], token_budget: int | None) -> Plan:
        num_ranks, budget = self._distributed.world_size, token_budget or self.budget.tokens
        if self._shares_prefixes(batch, rows):
            keys = [token_keys(batch.rows[row], with_routes=self._with_routes) for row in rows]
            assigned = plan_bundles(keys, num_ranks=num_ranks, token_budget=budget)
        else:
            assigned = plan(batch.row_lengths[list(rows)].tolist(), num_ranks=num_ranks, token_budget=budget)
        return replace(
            assigned,
            microbatches=tuple(
                tuple(tuple(rows[i] for i in pack) for pack in packs) for packs in assigned.microbatches
            ),
        )

    def packed(self, batch: StepBatch, pack: Sequence[int]) -> PackedBatch:
        """Collate the rows of a pack from `share`, on the device."""
        return collate(
            batch.rows,
            pack,
            batch.layout,
            share_prefixes=self._shares_prefixes(batch, pack),
            with_routes=self._with_routes,
            images=self._images,
            device=self._distributed.device,
        )

    def _shares_prefixes(self, batch: StepBatch, rows: Sequence[int]) -> bool:
        return batch.row_lengths[list(rows)].max(initial=0) <= self._longest_shared

    def forward(self, packed: PackedBatch, **arguments: bool) -> tuple[Tensor, ...]:
        """Run the module on a pack, by default without entropy. arguments: further ones of its forward."""
        return self._module(packed, temperature=self._temperature, **{"with_entropy": False, **arguments})

    def score(self, batch: StepBatch, rows: Sequence[int] | None = None, *, token_budget: int | None = None) -> Tensor:
        """Return (N,) float32 logprobs of trained tokens, 0 outside of `rows` (default: all); a collective."""
        indices = range(len(batch.rows)) if rows is None else rows
        return self._run(batch, indices, token_budget)[0][0]

    def score_with(
        self, batch: StepBatch, *, values: bool = False, routes: bool = False
    ) -> tuple[Tensor, Tensor | None, StepBatch]:
        """Return (N,) logprobs, values, and the batch with the experts of this pass as its routes; a collective.

        values: of a module with a critic; otherwise None. routes: of a mixture of experts; otherwise the same batch.
        """
        outputs_N, experts = self._run(batch, range(len(batch.rows)), with_values=values, with_routes=routes)
        batch = batch.with_routes(experts, self._distributed) if routes else batch
        return outputs_N[0], outputs_N[1] if values else None, batch

    def score_with_entropy(self, batch: StepBatch, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (N,) float32 logprobs and entropies [nats] of trained tokens, 0 outside of `rows`; a collective."""
        outputs_N, _ = self._run(batch, rows, with_entropy=True)
        return outputs_N[0], outputs_N[1]

    def _run(
        self,
        batch: StepBatch,
        rows: Sequence[int],
        token_budget: int | None = None,
        *,
        with_values: bool = False,
        with_routes: bool = False,
        with_entropy: bool = False,
    ) -> tuple[Tensor, dict[int, np.ndarray]]:
        """Return (1 to 3, N) logprobs, values and entropies, and by row of this rank the experts of its tokens."""
        forward = partial(self._scores, with_values=with_values, with_routes=with_routes, with_entropy=with_entropy)

        def all_packs(token_budget: int) -> tuple[Tensor, dict[int, np.ndarray]]:
            packs = self.share(batch, rows, token_budget=token_budget).packs
            outputs_N = torch.zeros(1 + with_values + with_entropy, batch.layout.num_tokens)
            outputs: list[tuple[Tensor, Tensor]] = []
            routes: list[Tensor] = []
            for pack in packs:
                packed = self.packed(batch, pack)
                output_T, routes_L = self.budget.agreed(partial(forward, packed))
                outputs.append((packed.token_index_T, output_T))
                routes += [] if routes_L is None else [routes_L]
            for index_T, output_T in outputs:  # after all passes, because a copy to the host waits for the device
                outputs_N[:, index_T] = output_T.cpu()
            return outputs_N, self._of_rows(batch, packs, routes) if with_routes else {}

        lengths = batch.row_lengths[list(rows)].tolist()
        with torch.no_grad():
            outputs_N, routes = self.budget.attempt(all_packs, lengths, at_most=token_budget)
        return self._distributed.sum(outputs_N), routes  # each token was scored on one rank, the others hold 0

    def _of_rows(
        self, batch: StepBatch, packs: Sequence[Sequence[int]], routes: Sequence[Tensor]
    ) -> dict[int, np.ndarray]:
        """Return the (tokens, layers, k) experts of each row of this rank's packs.

        routes: (L, layers, k) of each pack.
        """
        of_rows = {}
        for pack, routes_L in zip(packs, routes, strict=True):
            if pack:
                on_host = routes_L.cpu().numpy()
                places = row_places(
                    batch.rows, pack, share_prefixes=self._shares_prefixes(batch, pack), with_routes=self._with_routes
                )
                of_rows |= {row: on_host[place] for row, place in zip(pack, places, strict=True)}
        return of_rows

    def _scores(
        self, packed: PackedBatch, *, with_values: bool = False, with_routes: bool = False, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (1, T) logprobs, with values and entropies below them, and the experts of all tokens, if asked for."""
        flags = {"with_values": with_values, "with_routes": with_routes, "with_entropy": with_entropy}
        arguments = {name: True for name, is_set in flags.items() if is_set}
        logp_T, entropy_T, *others = self.forward(packed, **arguments)
        routes = others.pop() if with_routes else None
        outputs = (logp_T, *others, *([entropy_T] if with_entropy else []))
        return torch.stack([output_T.float() for output_T in outputs]), routes

    def refuse_leaks(self, policy: Policy, *, dtype: torch.dtype, length: int, with_values: bool) -> None:
        """Raise `ConfigError` if rows of a pack can see each other; a collective.

        policy: the one inside the module. dtype: of the computation. length: of the long row of the check.
        """
        isolation.check(
            lambda packed: self._scores(packed, with_values=with_values)[0],
            vocab_size=policy.vocab_size,
            length=length,
            name=type(policy.causal_lm).__name__,
            dtype=dtype,
            device=self._distributed.device,
        )

    def refuse_imprecise_layers(self, policy: Policy, *, dtype: torch.dtype, length: int) -> None:
        """Raise `ConfigError` if a layer differs from its computation in float32; a collective.

        policy: the one inside the module. dtype: of the computation. length: longest row, of which a part is computed.
        """
        device = self._distributed.device
        layer_precision.check(
            policy,
            self.forward,
            length=min(length, layer_precision.TOKENS[device.type]),
            dtype=dtype,
            gather=self._distributed.whole_parameters,
        )

    def total(self, batch: StepBatch, rows: Sequence[int], measure: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Return the sum of `measure(packed)` over the packs of all ranks, without gradients; a collective.

        measure: calls `forward` once, and returns a tensor of one shape.
        """

        def all_packs(token_budget: int) -> Tensor:
            packs = self.share(batch, rows, token_budget=token_budget).packs
            parts = [self.budget.agreed(partial(measure, self.packed(batch, pack))) for pack in packs]
            return torch.stack(parts).sum(0)

        with torch.no_grad():
            measured = self.budget.attempt(all_packs, batch.row_lengths[list(rows)].tolist())
        return self._distributed.sum(measured)

    def score_repacked(self, batch: StepBatch) -> Tensor:
        """Score with the smallest possible packs, about one row each; a collective."""
        return self.score(batch, token_budget=int(batch.row_lengths.max(initial=1)))
