"""The report of one step, for loggers and people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rollout.records import Rollout
from trainer.batch.step_batch import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step, after its weights are in the engine."""

    update: int
    """Number of optimizer updates done."""
    metrics: Mapping[str, float]
    rollouts: Sequence[Rollout]
    """Rollouts of this rank's engine; empty on ranks without one."""
    batch: StepBatch
    logp_train_N: torch.Tensor
    """The trainer's logprobs of the trained tokens, with the weights that sampled them."""
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    """Correction weights."""
