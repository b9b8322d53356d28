"""Length control: a reward for short rollouts, relative to the others of the group.

| rule      | added reward, before its weight                            | source                           |
|-----------|------------------------------------------------------------|----------------------------------|
| `kimi`    | λ = ½ − (l − min) / (max − min) if solved, else min(0, λ)  | Kimi k1.5 (arXiv 2501.12599)     |
| `sigmoid` | −σ((l − mean) / std) over the solved ones; else 0          | Arora, Zanette (arXiv 2502.04463)|
| `alp`     | −(l / horizon) · max(p, 1/G), p the share of solved ones   | ALP (arXiv 2506.05256)           |

l is the number of sampled tokens of the rollout over all turns. With `alp` a token costs the more the more often the
group solves the prompt, so that hard prompts keep their length.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.rollout.records import Rollout

EPS = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout of a group."""

    length: int
    """Sampled tokens over all turns."""
    is_solved: bool


def kimi(group: Sequence[Member], *, horizon: int) -> list[float]:
    """Return the reward of each rollout; 0 if all have one length."""
    lengths = [member.length for member in group]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    if not spread:
        return [0.0] * len(group)
    scores = [0.5 - (length - shortest) / spread for length in lengths]
    return [score if member.is_solved else min(0.0, score) for score, member in zip(scores, group, strict=True)]


def sigmoid(group: Sequence[Member], *, horizon: int) -> list[float]:
    """Return the reward of each rollout. The deviation is that of the population."""
    solved_lengths = [member.length for member in group if member.is_solved]
    if not solved_lengths:
        return [0.0] * len(group)
    mean, std = statistics.fmean(solved_lengths), statistics.pstdev(solved_lengths) + EPS
    return [-1 / (1 + math.exp((mean - member.length) / std)) if member.is_solved else 0.0 for member in group]


def alp(group: Sequence[Member], *, horizon: int) -> list[float]:
    """Return the reward of each rollout. horizon: longest completion [tokens]."""
    num_solved = sum(member.is_solved for member in group)
    pass_rate = max(num_solved, 1) / len(group)
    return [-pass_rate * member.length / horizon for member in group]


RULES: Mapping[str, Callable[..., list[float]]] = {"kimi": kimi, "sigmoid": sigmoid, "alp": alp}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthControl:
    """A rule with its weight. The default adds nothing."""

    rule: str = "off"
    """One of `RULES`, or off."""
    weight: float = 0.0
    solved_reward: float = 1.0
    """Reward of the functions from which a rollout counts as solved."""
    horizon: int = 0
    """Longest completion of a rollout over all turns [tokens]."""

    def terms(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """Return the weighted reward of each rollout, in whole groups; None where none is added.

        rollouts: with the reward of the functions. Only trainable ones are members of their group.
        """
        terms: list[float | None] = [None] * len(rollouts)
        if self.rule == "off":
            return terms
        groups: dict[int, list[int]] = defaultdict(list)
        for index, rollout in enumerate(rollouts):
            if rollout.is_trainable:
                groups[rollout.group_id].append(index)
        for indices in groups.values():
            members = [
                Member(length=rollout.num_sampled, is_solved=rollout.reward >= self.solved_reward)
                for rollout in (rollouts[index] for index in indices)
            ]
            for index, term in zip(indices, RULES[self.rule](members, horizon=self.horizon), strict=True):
                terms[index] = self.weight * term
        return terms
