"""The two sides of the comparison, as the diagnosis calls them: the trainer's scores and the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from rollout.engine.protocol import Engine
from rollout.records import TrainingRow
from rollout.system.background_loop import BackgroundLoop
from trainer.batch.step_batch import StepBatch
from trainer.config.schema import Config
from trainer.distributed.distributed import Distributed
from trainer.score.scorer import Scorer

ONE_ROW_PER_PACK = 1
"""As a token budget: every row exceeds it and is packed alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerScorer:
    """Scores rows as a training step does: planned, packed, through the wrapped module, with its precision."""

    module: nn.Module
    distributed: Distributed
    config: Config

    def __call__(
        self, rows: Sequence[TrainingRow], *, temperature: float | None = None, alone: bool = False
    ) -> list[np.ndarray]:
        if not rows:
            return []
        scorer = Scorer(
            self.module,
            self.distributed,
            temperature=self.config.rollout.temperature if temperature is None else temperature,
            token_budget=ONE_ROW_PER_PACK if alone else self.config.token_budget,
            share_prefixes=self.config.share_prefixes,
        )
        batch = _batch_of(rows)
        logp_N = scorer.score(batch)
        return np.split(logp_N.numpy(), batch.layout.token_start[1:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedScores:
    """The engine's scores, for synchronous code."""

    engine: Engine
    loop: BackgroundLoop

    @property
    def max_tokens(self) -> int:
        return self.engine.max_model_len - 1  # the engine samples one token to score the others

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        async def all_of_them() -> list[list[float]]:
            return await asyncio.gather(*(self.engine.score(ids) for ids in sequences))

        return self.loop.run(all_of_them())


def _batch_of(rows: Sequence[TrainingRow]) -> StepBatch:
    """A batch to score and nothing else: it has no rewards, which scoring does not read."""
    rollout_ids = np.unique([row.rollout_id for row in rows])
    return replace(StepBatch.of([], mask_truncated=False), rows=tuple(rows), rollout_ids=rollout_ids)
