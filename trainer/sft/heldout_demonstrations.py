"""Evaluation on held-out demonstrations, of runs without rollouts (`algorithm=sft`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.data.demonstrations import Demonstration
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.evaluate.evaluation import Evaluation
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.sft.demonstration_rows import batch_of


class HeldoutDemonstrations:
    """Cross-entropy of the trained model on held-out demonstrations."""

    def __init__(
        self,
        names: Iterable[str],
        sets: Sequence[Sequence[Demonstration]] | None,
        distributed: Distributed,
        *,
        limit: int | None,
    ) -> None:
        """Share the held-out sets; a collective. sets: from `tokenized`. limit: conversations of a set; None: all."""
        self._batches: dict[str, StepBatch] = {
            name: dealt(batch_of([] if sets is None else sets[number][:limit]), distributed)
            for number, name in enumerate(names)
        }

    def evaluate(self, scorer: Scorer) -> Evaluation:
        """Return the mean over trained tokens, and its exponential, of each set; a collective.

        scorer: of the trained module, at temperature 1.
        """
        losses: dict[str, float] = {}
        for name, batch in self._batches.items():
            mean = -float(scorer.score(batch).double().mean())
            prefix = f"eval/{name}/" if name else "eval/"
            losses |= {f"{prefix}cross_entropy": mean, f"{prefix}perplexity": math.exp(min(mean, 700.0))}
        return Evaluation(losses=losses)
