"""Splits of rows that are made: seeds (`data.path=seeds:<count>`), and questions, by the question alone."""

from __future__ import annotations

import hashlib

from lockstep.rollout.errors import ConfigError

SEEDS = "seeds:"
"""Beginning of a path that names a number of seeds, for environments that make an episode from a seed."""
FIRST = {"train": 0, "test": 10**9}
"""First seed of a split."""
HELDOUT_ONE_IN = 8
"""One prompt in eight is held out, chosen by its hash: the split does not depend on seed, order or number of rows."""


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


def is_heldout(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % HELDOUT_ONE_IN == 0
