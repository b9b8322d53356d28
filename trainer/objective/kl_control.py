"""The coefficient β of the KL penalty in the reward: fixed, or adapted so that the KL stays near a target.

A controller is a pure rule from one coefficient to the next. The coefficient itself is state of the run: it is the same
on every rank, because every rank applies the rule to the same global mean, and it is saved in the checkpoint.

Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2; seed 003, "Adaptive KL".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ERROR_BOUND = 0.2
"""The relative error is clipped to ± this, so that one bad batch cannot throw the coefficient."""
MAX_EPISODES_PER_HORIZON = 1 / ERROR_BOUND
"""At this many episodes per horizon an error at the bound makes β zero; beyond it, negative."""


class KlController(Protocol):
    def next(self, coefficient: float, *, kl: float, num_episodes: int) -> float:
        """The coefficient after a batch.

        Args:
            coefficient: β that the batch was penalised with.
            kl: mean over the batch's episodes, on all ranks, of the sum over an episode's tokens of
                log π − log π_ref [nats].
            num_episodes: of the batch, on all ranks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKl:
    """β stays what it is."""

    def next(self, coefficient: float, *, kl: float, num_episodes: int) -> float:
        return coefficient


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKl:
    """β ← β (1 + e n / horizon), with e = clip(kl / target − 1, −0.2, 0.2) and n the episodes of the batch."""

    target: float
    """KL per episode to settle at [nats]."""
    horizon: int
    """Episodes over which an error at the bound changes β by 20 %."""

    def __post_init__(self) -> None:
        if not self.target > 0 or not self.horizon > 0:
            raise ValueError(
                f"adaptive KL: target is {self.target} and horizon {self.horizon}, expected both above 0 "
                "(6 and 10000 are usual)"
            )

    def next(self, coefficient: float, *, kl: float, num_episodes: int) -> float:
        """Raises ValueError if the batch is so large against the horizon that β could change its sign."""
        refuse_short_horizon(num_episodes, self.horizon)
        error = min(max(kl / self.target - 1, -ERROR_BOUND), ERROR_BOUND)
        return coefficient * (1 + error * num_episodes / self.horizon)


def refuse_short_horizon(num_episodes: int, horizon: int) -> None:
    """Raise ValueError if n ≥ 5 · horizon, for which 1 + e n / horizon is not positive at e = −0.2."""
    if num_episodes >= MAX_EPISODES_PER_HORIZON * horizon:
        raise ValueError(
            f"adaptive KL: {num_episodes} episodes per batch with a horizon of {horizon} can make the coefficient zero "
            f"or negative; expected a horizon above {num_episodes / MAX_EPISODES_PER_HORIZON:g}"
        )
