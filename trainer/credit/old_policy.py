"""π_old, the proximal policy of an update, with its logprobs from one of three sources (`StepPlan.old`).

| form         | source of log π_old                     | used                                                       |
|--------------|-----------------------------------------|------------------------------------------------------------|
| `Recomputed` | a pass of the trainer before the update | with several updates per batch, or where a weight, an      |
|              |                                         | advantage or a mask depends on all tokens                  |
| `FromEngine` | the engine's sampling logprobs          | with `correction.logp_old=bypass`                          |
| `FromUpdate` | the first forward pass of the update    | otherwise                                                  |

Dimensions: `_N` trained tokens of the step, `_T` trained tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """Logprobs by a pass of the trainer with the weights before the update."""

    logp_N: Tensor

    def at(self, index_T: Tensor, logp_T: Tensor) -> Tensor:
        """Return (T,) log π_old. index_T: indices of tokens of the step. logp_T: log π_θ of these tokens."""
        return self.logp_N[index_T].to(logp_T.device, logp_T.dtype)

    def by_trainer(self, seen_N: Tensor) -> Tensor:
        """Return (N,) the trainer's logprobs before the update. seen_N: those of the update's first forward pass."""
        return self.logp_N


@dataclass(frozen=True, slots=True, eq=False)
class FromEngine:
    """Logprobs of the engine: the ratio of the loss carries the mismatch between engine and trainer."""

    logp_N: Tensor

    def at(self, index_T: Tensor, logp_T: Tensor) -> Tensor:
        return self.logp_N[index_T].to(logp_T.device, logp_T.dtype)

    def by_trainer(self, seen_N: Tensor) -> Tensor:
        return seen_N


@dataclass(frozen=True, slots=True, eq=False)
class FromUpdate:
    """Logprobs of the update's first forward pass, whose weights are still those of π_old."""

    logp_N: None = None

    def at(self, index_T: Tensor, logp_T: Tensor) -> Tensor:
        return logp_T.detach()

    def by_trainer(self, seen_N: Tensor) -> Tensor:
        return seen_N


OldPolicy = Recomputed | FromEngine | FromUpdate
