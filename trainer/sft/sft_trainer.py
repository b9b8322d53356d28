"""One step of training on demonstrations alone (`algorithm=sft`): rows, optimizer step, no engine.

Takes the place of `Trainer` (trainer/step.py) in a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from lockstep.rollout.sampler.sampler import OnRollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.demonstrations import Demonstration
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.evaluate.evaluator import Evaluation
from lockstep.trainer.observe.metrics_log import BATCH
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.sft.demonstration_rows import Demonstrations, batch_of, shared
from lockstep.trainer.stopwatch import Stopwatch
from lockstep.trainer.update.updater import Updater


class SftTrainer:
    """Stages of a training step on demonstrations."""

    def __init__(
        self, config: Config, *, distributed: Distributed, updater: Updater, demonstrations: Demonstrations
    ) -> None:
        self._updater = updater
        self._distributed = distributed
        self._demonstrations = demonstrations
        self.noise_floor: Mapping[str, float] = {}
        """Empty: nothing is sampled."""
        self.num_steps = 0
        self.kl_coef = config.algorithm.kl_coef

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer updates done."""
        return self._updater.num_updates

    def push_weights(self) -> None:
        """Do nothing: there is no engine."""

    def step(
        self, on_rollout: OnRollout = lambda rollout: None, on_stage: Callable[[str], None] = lambda name: None
    ) -> StepReport:
        """Make one training step; a collective. on_stage: called with its name when a stage begins."""
        watch = Stopwatch(on_stage)
        batch = self._demonstrations.draw(watch.stage)
        with watch.stage("update"):
            metrics = self._updater.given_step({self._demonstrations.name: batch})
        self.num_steps += 1
        metrics |= {BATCH: float(self.num_steps), **watch.metrics()}
        num_tokens = batch.layout.num_tokens
        metrics["perf/trained_tokens_per_s"] = num_tokens / metrics["time/update"]
        nothing_N = torch.zeros(num_tokens)
        return StepReport(
            update=self.version,
            metrics=metrics,
            rollouts=(),
            batch=batch,
            logp_train_N=nothing_N,
            advantages_N=nothing_N,
            weights_N=nothing_N,
        )


class HeldoutDemonstrations:
    """Cross-entropy of the trained model on held-out demonstrations."""

    def __init__(
        self,
        config: Config,
        *,
        distributed: Distributed,
        module: nn.Module,
        loaded: Sequence[Sequence[Demonstration]] | None,
    ) -> None:
        """A collective. loaded: `tokenized` held-out data."""
        self._distributed = distributed
        self._scorer = Scorer(
            module,
            distributed,
            temperature=1.0,
            token_budget=config.pack_tokens,
            share_prefixes=config.share_prefixes,
        )
        self._batches: dict[str, StepBatch] = {
            name: shared(batch_of([] if loaded is None else loaded[number][: config.eval.prompts]), distributed)
            for number, name in enumerate(config.heldout_sets())
        }

    def evaluate(self) -> Evaluation:
        """Return the mean over trained tokens, and its exponential, of each set; a collective."""
        losses: dict[str, float] = {}
        for name, batch in self._batches.items():
            mean = -float(self._scorer.score(batch).double().mean())
            prefix = f"eval/{name}/" if name else "eval/"
            losses |= {f"{prefix}cross_entropy": mean, f"{prefix}perplexity": math.exp(min(mean, 700.0))}
        return Evaluation(losses=losses)
