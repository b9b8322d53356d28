"""Demonstrations as a component of the loss: their cross-entropy, on rows of their own.

    loss = w · Σ_t −log π(token t) / D        D: trained tokens of the step's rows, on all ranks

Dimensions: _T trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.chat.chat import Chat
from trainer.batch.packing import PackedBatch
from trainer.batch.step_batch import StepBatch, decode, encode
from trainer.config.schema import Config, DataSetConfig
from trainer.data.demonstrations import Demonstration, load_demonstrations
from trainer.data.prompts import Prompts
from trainer.distributed.distributed import Distributed
from trainer.update.components import Outputs, Share, TokenSet, component_metrics
from trainer.update.router_loss import RouterLoss, RouterStep
from trainer.update.schedule import component_weight

NAME = "demonstrations"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CrossEntropyTerm:
    """Cross-entropy of all trained tokens of a token set, in one optimizer step."""

    name: str
    weight: float
    num_tokens: int
    """D."""
    routers: RouterStep | None = None
    """Losses about the routers on the same tokens, not weighted; None: none."""

    def arguments(self, packed: PackedBatch) -> Mapping[str, Any]:
        return {}

    def share(self, outputs: Outputs) -> Share:
        cross_entropy = -outputs.logp_T.sum()
        loss = self.weight * cross_entropy / max(self.num_tokens, 1)
        sums = {
            f"loss/{self.name}": cross_entropy.detach(),
            f"loss/{self.name}_entropy": outputs.entropy_T.detach().sum(),
        }
        if self.routers is not None:
            router = self.routers.share(outputs.routers, outputs.packed.target_index_T)
            loss = loss if router.loss is None else loss + router.loss
            sums |= router.sums
        return Share(loss=loss, sums=sums)

    def metrics(self, totals: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Return means over the trained tokens."""
        means = {name: float(total) / max(self.num_tokens, 1) for name, total in totals.items() if total.ndim == 0}
        loss = means[f"loss/{self.name}"]
        of_routers = {} if self.routers is None else self.routers.metrics(totals)
        common = component_metrics(self.name, loss=loss, weight=self.weight, num_tokens=self.num_tokens)
        return {**means, **common, **of_routers}


class Demonstrations:
    """The demonstrations of a run, mixed into the updates of rollouts, or trained alone."""

    name = NAME

    def __init__(
        self, config: Config, distributed: Distributed, sets: Sequence[Sequence[Demonstration]] | None
    ) -> None:
        """sets: one per set of `Config.demonstration_sets`; None on ranks other than 0, which get each step's rows."""
        self._config = config
        self._distributed = distributed
        self._order = None
        if sets is not None:
            weights = [settings.weight for settings in config.demonstration_sets().values()]
            self._order = Prompts(sets, seed=config.seed, shuffle=config.data.shuffle, weights=weights)
        self.cursor = 0

    @classmethod
    def load(
        cls, config: Config, distributed: Distributed, chat: Chat, *, say: Callable[[str], None]
    ) -> Demonstrations | None:
        """Load and tokenize the configured demonstrations; a collective. None if there are none."""
        found = config.demonstration_sets()
        return cls(config, distributed, tokenized(found, config, distributed, chat, say=say)) if found else None

    @property
    def count(self) -> int:
        """Number of demonstrations in the data; 0 on ranks other than 0."""
        return 0 if self._order is None else len(self._order)

    def draw(self) -> StepBatch:
        """Return the rows of the next optimizer step, the same on every rank; a collective."""
        batch = None
        if self._order is not None:
            self._order.cursor = self.cursor
            taken: list[Any] = self._order.take(self._config.demonstrations.rows_per_update)
            batch = batch_of(taken)
        self.cursor += self._config.demonstrations.rows_per_update
        return shared(batch, self._distributed)

    def token_set(self, batch: StepBatch, *, update: int, routers: RouterLoss | None) -> TokenSet:
        """Return rows from `draw` with their cross-entropy."""
        rows, num_tokens = range(len(batch.rows)), batch.layout.num_tokens
        every_N = torch.ones(num_tokens, dtype=torch.bool)
        term = CrossEntropyTerm(
            name=NAME,
            weight=self._weight(update),
            num_tokens=num_tokens,
            routers=None if routers is None else routers.opened(batch, rows, every_N, num_tokens),
        )
        return TokenSet(batch=batch, rows=rows, terms=[term])

    def metrics(self) -> dict[str, float]:
        """Return `data/demonstrations_epoch`, passes over the demonstrations; nothing on ranks other than 0."""
        return {} if self._order is None else {"data/demonstrations_epoch": self.cursor / len(self._order)}

    def _weight(self, update: int) -> float:
        settings = self._config.demonstrations
        if not self._config.has_rollouts:
            return 1.0
        return component_weight(
            update,
            first=settings.weight,
            last=settings.final_weight,
            schedule=settings.weight_schedule,
            total_updates=self._config.updates,
        )


def tokenized(
    sets: Mapping[str, DataSetConfig],
    config: Config,
    distributed: Distributed,
    chat: Chat,
    *,
    say: Callable[[str], None],
) -> list[list[Demonstration]] | None:
    """Load and tokenize data sets on rank 0; a collective. Other ranks get None."""
    return distributed.together(
        lambda: (
            [
                load_demonstrations(one, chat, max_tokens=config.demonstrations.max_tokens, say=say)
                for one in sets.values()
            ]
            if distributed.is_main
            else None
        )
    )


def shared(batch: StepBatch | None, distributed: Distributed) -> StepBatch:
    """Return rank 0's batch on every rank; a collective."""
    if batch is not None and distributed.world_size == 1:
        return batch
    return decode(distributed.broadcast_bytes(b"" if batch is None else encode(batch)))


def batch_of(demonstrations: Sequence[Demonstration]) -> StepBatch:
    """Return the rows of demonstrations as a batch, in which each counts as a rollout without a reward."""
    rows = tuple(one.row(number) for number, rows in enumerate(demonstrations) for one in rows)
    count = len(demonstrations)
    turns = np.array([1 + max(int(one.turns.max()) for one in rows) for rows in demonstrations], dtype=np.int64)
    return StepBatch(
        rows=rows,
        rollout_ids=np.arange(count, dtype=np.int64),
        group_S=np.arange(count, dtype=np.int64),
        rewards_S=np.zeros(count),
        is_kept_S=np.ones(count, dtype=np.bool_),
        greedy_rewards_S=np.full(count, np.nan),
        num_turns_S=turns,
        turn_rewards_K=np.zeros(int(turns.sum())),
        terms_SF=np.zeros((count, 0)),
        term_weights_F=np.zeros(0),
        states_K=np.full(int(turns.sum()), -1, dtype=np.int64),
    )
