"""Rows of `data.path=seeds:<count>`, for environments that make an episode from a seed: nothing but column `seed`."""

from __future__ import annotations

from lockstep.rollout.errors import ConfigError

SEEDS = "seeds:"
"""Beginning of a path that names a number of seeds."""
FIRST = {"train": 0, "test": 10**9}
"""First seed of a split."""


def seeds(path: str, split: str) -> list[int]:
    """Return as many seeds as the path says, others in each split. Raises `ConfigError`."""
    count = path.removeprefix(SEEDS)
    if not count.isdecimal() or not 0 < int(count) <= 10**7:
        raise ConfigError(
            f"{path}: found {count!r}, expected a number of seeds up to 10 million; set data.path=seeds:1000"
        )
    if split not in FIRST:
        raise ConfigError(
            f"{path} has the splits train and test, found {split!r}; set data.split=train data.heldout_split=test"
        )
    return list(range(FIRST[split], FIRST[split] + int(count)))
