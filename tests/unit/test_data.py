"""Data order is a function of the seed and the cursor."""

import json
from pathlib import Path

import pytest

from rollout.errors import DataError
from trainer.data import Prompts, load_rows


def prompts(cursor: int = 0, *, n: int = 10, seed: int = 0, shuffle: bool = True) -> Prompts:
    order = Prompts([{"i": i} for i in range(n)], seed=seed, shuffle=shuffle)
    order.cursor = cursor
    return order


def test_every_row_comes_once_per_epoch() -> None:
    order = prompts()
    taken = [row["i"] for row in order.take(4) + order.take(4) + order.take(4) + order.take(8)]
    assert sorted(taken[:10]) == list(range(10))
    assert sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]


def test_a_resumed_order_continues_where_it_stopped() -> None:
    whole = [row["i"] for row in prompts().take(25)]
    resumed = [row["i"] for row in prompts(cursor=13).take(12)]
    assert whole[13:] == resumed


def test_another_seed_is_another_order() -> None:
    assert prompts(seed=0).take(10) != prompts(seed=1).take(10)


def test_without_shuffle_the_order_is_that_of_the_file() -> None:
    assert [row["i"] for row in prompts(shuffle=False).take(12)] == [*range(10), 0, 1]


def test_jsonl_rows_load(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(3)))
    rows = load_rows(str(path), "train")
    assert [row["question"] for row in rows] == ["q0", "q1", "q2"]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("not json\n")
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        load_rows(str(path), "train")
