"""Reward shaping: turn rewards, DAPO's length penalty and length control, added to the reward of the functions.

Source of the length penalty: DAPO (Yu et al. 2025, arXiv 2503.14476), equation 13, "soft overlong punishment".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.rewards.length import LengthControl
from lockstep.rewards.outcomes import MAX_REWARD
from lockstep.rollout.records import Rollout, RolloutStatus

TURN_REWARDS = "turn_rewards"
"""Outcome in which an environment reports one reward per turn: numbers in the order of the engine calls."""
TURN_STATES = "turn_states"
"""Outcome in which an environment reports its state before each turn: texts in the order of the engine calls."""
TURNS = "turns"
"""Name of the sum of the turn rewards among the rewards of a rollout."""
OVERLONG = "overlong"
"""Name of the length penalty among the rewards of a rollout."""
LENGTH = "length_control"
"""Name of the reward of length control among the rewards of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Terms that are added to the reward of every trainable rollout. The default adds none."""

    turn_rewards: bool = False
    """Add the turn rewards that the environment reports."""
    turn_states: bool = False
    """Check the states that the environment reports."""
    horizon: int = 0
    """Longest completion of a rollout over all turns [tokens]."""
    overlong_buffer: float = 0.0
    """Share of the horizon at its end in which the length penalty grows, in (0, 1]; 0: no length penalty."""
    overlong_penalty: float = 1.0
    """Length penalty at the horizon and beyond."""
    length: LengthControl = field(default_factory=LengthControl)

    def apply_to(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with all terms. rollouts: whole groups, with the reward of the functions."""
        terms = self.length.terms(rollouts)
        shaped_rollouts = map(self.apply, rollouts)
        return [
            rollout if term is None or not rollout.is_trainable else _with_terms(rollout, {LENGTH: term})
            for rollout, term in zip(shaped_rollouts, terms, strict=True)
        ]

    def apply(self, rollout: Rollout) -> Rollout:
        """Return the rollout with each of its own terms in `rewards` by name and in `reward`; FAILED if turn rewards or
        states are malformed."""
        if not rollout.is_trainable:
            return rollout
        terms: dict[str, float] = {}
        if self.turn_rewards:
            rewards = rollout.outcome.get(TURN_REWARDS, ())
            if problem := _turn_rewards_problem(rewards, rollout.num_turns):
                return replace(rollout, status=RolloutStatus.FAILED, error=problem)
            terms[TURNS] = math.fsum(rewards)
        if self.turn_states and (problem := _turn_states_problem(rollout)):
            return replace(rollout, status=RolloutStatus.FAILED, error=problem)
        if self.overlong_buffer:
            start = (1 - self.overlong_buffer) * self.horizon
            terms[OVERLONG] = self.overlong_penalty * length_penalty(
                rollout.num_sampled, start=start, horizon=self.horizon
            )
        return _with_terms(rollout, terms) if terms else rollout


def _with_terms(rollout: Rollout, added: Mapping[str, float]) -> Rollout:
    return replace(rollout, reward=rollout.reward + sum(added.values()), rewards={**rollout.rewards, **added})


def length_penalty(num_tokens: int, *, start: float, horizon: float) -> float:
    """Return DAPO's soft overlong punishment: 0 up to `start` tokens, linear to -1 at `horizon`, -1 beyond.

    num_tokens: sampled tokens over all turns. start: L_max - L_cache, horizon: L_max in the paper.
    """
    return -min(max((num_tokens - start) / (horizon - start), 0.0), 1.0)


def turn_rewards(rollout: Rollout, *, reported: bool) -> np.ndarray:
    """Return the reward of each turn, (turns,) float64; the last turn gets the rest, so that the sum is the reward.

    reported: use the turn rewards of environment and reward functions; else all but the last are 0.
    """
    rewards = np.zeros(rollout.num_turns)
    if reported:
        values: Sequence[float] = rollout.outcome.get(TURN_REWARDS, ())
        rewards[: len(values)] = values
        rewards[: len(rollout.turn_rewards)] += rollout.turn_rewards
    rewards[-1] += rollout.reward - rewards.sum()
    return rewards


def turn_states(rollout: Rollout) -> Sequence[Any]:
    """Return the state before each turn: as the environment reports it, else the conversation, images included."""
    return rollout.outcome.get(TURN_STATES) or [call.state for call in rollout.calls]


def _turn_states_problem(rollout: Rollout) -> str | None:
    """Return what is wrong with reported states, or None."""
    states = rollout.outcome.get(TURN_STATES, [])
    if not isinstance(states, (list, tuple)) or not all(isinstance(state, str) for state in states):
        return f"outcome {TURN_STATES} is {states!r:.200}; expected a list of texts"
    if states and len(states) != rollout.num_turns:
        return f"outcome {TURN_STATES} has {len(states)} texts; expected {rollout.num_turns}, one per turn"
    return None


def _turn_rewards_problem(given: Any, num_turns: int) -> str | None:
    """Return what is wrong with reported turn rewards, or None. Trailing turns may be left out."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(value, (int, float)) for value in given):
        return f"outcome {TURN_REWARDS} is {given!r:.200}; expected a list of numbers"
    if len(given) > num_turns or not all(abs(value) <= MAX_REWARD for value in given):
        return f"outcome {TURN_REWARDS} is {given!r:.200}; expected at most {num_turns} finite numbers, one per turn"
    return None
