"""Rows of `data.path=seeds:<count>`."""

from __future__ import annotations

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.data.datasets import load_rows
from lockstep.trainer.data.split import seeds


def test_each_split_has_seeds_of_its_own() -> None:
    rows = load_rows("seeds:5", "train")
    assert list(rows) == [{"seed": seed} for seed in range(5)]
    assert not set(seeds("seeds:1000", "train")) & set(seeds("seeds:1000", "test"))


@pytest.mark.parametrize(
    ("path", "split", "problem"),
    [
        ("seeds:", "train", "found '', expected a number of seeds"),
        ("seeds:0", "train", "found '0'"),
        ("seeds:-3", "train", "found '-3'"),
        ("seeds:99999999", "train", "up to 10 million"),
        ("seeds:10", "validation", "has the splits train and test, found 'validation'"),
    ],
)
def test_anything_else_is_refused(path: str, split: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        seeds(path, split)
