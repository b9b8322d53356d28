"""Data: file formats, renamed columns, and an order that is a function of seed and cursor."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import DataError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.datasets import load_rows, read_first_row, rename
from lockstep.trainer.data.prompt_filter import short_enough
from lockstep.trainer.data.prompts import DataSet, Position, Prompts, Row, load_data_set
from tests.fixtures.policies import CHAT

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(3)]


def begin(order: Prompts, count: int) -> list[tuple[int, Row]]:
    """Begin rows; return them with their places."""
    places = order.begin(count)
    return list(zip(places, order.rows(places), strict=True))


def prompts(cursor: int = 0, *, n: int = 10, seed: int = 0, shuffle: bool = True) -> Prompts:
    order = Prompts([[{"i": i} for i in range(n)]], seed=seed, shuffle=shuffle)
    order.cursor = cursor
    return order


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the suffix."""
    import datasets

    made = datasets.Dataset.from_list(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            made.to_csv(str(path))
        case ".parquet":
            made.to_parquet(str(path))
    return path


# Order


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


# Mixing


def mixed(cursor: int = 0, *, sizes: tuple[int, ...] = (7, 30), weights: tuple[float, ...] = (3, 1)) -> Prompts:
    sets = [[{"set": which, "i": i} for i in range(size)] for which, size in enumerate(sizes)]
    order = Prompts(sets, seed=5, shuffle=True, weights=weights)
    order.cursor = cursor
    return order


def test_weights_are_shares_of_every_stretch() -> None:
    taken = [row["set"] for row in mixed().take(4000)]
    assert Counter(taken) == {0: 3000, 1: 1000}
    for start in range(0, 3996, 97):
        assert 2 <= Counter(taken[start : start + 4])[0] <= 4, "not spread evenly"


def test_each_of_several_sets_goes_through_all_its_rows() -> None:
    taken = mixed().take(2000)
    small = [row["i"] for row in taken if row["set"] == 0]
    large = [row["i"] for row in taken if row["set"] == 1]
    assert all(sorted(small[at : at + 7]) == list(range(7)) for at in range(0, 1400, 7))
    assert all(sorted(large[at : at + 30]) == list(range(30)) for at in range(0, 480, 30))


@settings(max_examples=30)  # each draws thousands of rows
@given(st.integers(0, 1500), st.integers(1, 40))
def test_a_mix_is_resumed_exactly(cursor: int, count: int) -> None:
    assert mixed(cursor).take(count) == mixed().take(cursor + count)[cursor:]


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_shares_are_the_weights_to_a_thousandth(weights: list[float]) -> None:
    sizes = tuple(5 for _ in weights)
    found = Counter(row["set"] for row in mixed(sizes=sizes, weights=tuple(weights)).take(1000))
    assert sum(found.values()) == 1000
    for which, weight in enumerate(weights):
        assert found[which] == pytest.approx(1000 * weight / sum(weights), abs=1)


def test_a_weight_too_small_to_matter_is_refused() -> None:
    with pytest.raises(DataError, match=r"less than one row in 1000"):
        mixed(weights=(1.0, 1e-5))


# Files


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_rows_of_every_format_are_the_same(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert dict(read_first_row(str(path))) == ROWS[0]
    rows = load_rows(str(path), "train")
    assert [row["question"] for row in rows] == ["q0", "q1", "q2"]
    assert [str(row["answer"]) for row in rows] == ["0", "1", "2"]


def test_json_with_an_object_per_line_and_nested_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"q": {"text": "why"}}\n{"q": {"text": "how"}}\n')
    assert read_first_row(str(path)) == {"q": {"text": "why"}}
    assert load_rows(str(path), "train")[1] == {"q": {"text": "how"}}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", "not json\n", r"a\.jsonl"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n\n", "has no rows"),
        ("a.jsonl", "[1]\n", "expected"),
        ("a.json", "[]", "has no rows"),
        ("a.json", "{", r"a\.json"),
        ("a.json", "[3]", "expected a JSON object per row"),
        ("a.csv", "", "has no rows"),
        ("a.csv", "question,answer\n", "has no rows"),
        ("a.parquet", "PAR", r"a\.parquet"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=expected):
        read_first_row(str(path))


@pytest.mark.parametrize("text", ["not json\n", "", "[1]\n"])
def test_a_broken_file_is_named_when_it_is_loaded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        load_rows(str(path), "train")


# Columns


def test_columns_get_the_requested_names_beside_their_own() -> None:
    row = {"problem": "1+1", "solution": "2", "level": 3}
    found = rename(row, {"prompt": "problem", "answer": "solution"}, of="d")
    assert found == {"prompt": "1+1", "answer": "2", "level": 3, "problem": "1+1", "solution": "2"}


def test_swapped_columns_have_the_requested_values() -> None:
    row = {"prompt": "2", "answer": "1+1"}
    assert rename(row, {"prompt": "answer", "answer": "prompt"}, of="d") == {"prompt": "1+1", "answer": "2"}


def test_a_column_nested_in_columns_or_json_is_found() -> None:
    row = {"reward_model": {"ground_truth": "34"}, "extra": '{"index": {"n": 5}}', "a.b": 1}
    found = rename(row, {"answer": "reward_model.ground_truth", "n": "extra.index.n", "c": "a.b"}, of="d")
    assert (found["answer"], found["n"], found["c"]) == ("34", 5, 1)
    assert "reward_model" in found


def test_a_renamed_prompt_replaces_all_other_prompts() -> None:
    row = {"messages": [{"role": "user", "content": "another"}], "question": "this", "prompt": "old"}
    assert rename(row, {"prompt": "question"}, of="d") == {"prompt": "this"}


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("questoin", r"has question, meta; set 'data\.columns=\{prompt: question\}'"),
        ("meta.txt", r"\(and meta has text\); set 'data\.columns=\{prompt: meta\.text\}'"),
        ("nothing.at.all", "has question, meta"),
    ],
)
def test_a_missing_column_is_reported_with_the_existing_ones(column: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        rename({"question": "q", "meta": {"text": 1}}, {"prompt": column}, of="d")


def test_a_data_set_adds_system_prompt_environment_and_name_to_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"q": "why", "a": "because"}])
    data_set = DataSetConfig(
        path=str(path), split="train", columns={"prompt": "q"}, system_prompt="Be kind.", environment="tools"
    )
    data = load_data_set(data_set, name="mine")
    assert data[0] == {
        "q": "why",
        "a": "because",
        "prompt": "why",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "why"}],
        "environment": "tools",
        "dataset": "mine",
    }
    assert list(data) == [data[0]]


def test_a_chat_with_a_system_turn_keeps_it() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why"}]
    data_set = DataSetConfig(path="d", columns={}, system_prompt="Be kind.")
    assert DataSet([{"prompt": chat}], data_set)[0]["messages"] == chat


def test_a_wrong_column_is_refused_when_the_data_is_loaded() -> None:
    with pytest.raises(DataError, match="has no column q"):
        DataSet(ROWS, DataSetConfig(path="d", columns={"prompt": "q"}))[0]


def test_prompts_of_agents_are_not_measured_but_others_in_the_mix_are() -> None:
    rows = [{"question": "compute 1+1", "answer": "2"}, {"environment": "agent"},
            {"question": "compute " + "1+" * 2000 + "1", "answer": "2001"}]  # fmt: skip
    mixed = {"calculator": {}, "agent": {"agent": lambda *_: None}}
    said: list[str] = []
    with BackgroundLoop() as loop:
        kept = short_enough(
            DataSet(rows, DataSetConfig(path="d", columns={})), CHAT,
            lambda: make_environment("mixed", environments=mixed, default="calculator"), loop,
            max_tokens=2000, say=said.append,
        )  # fmt: skip
    assert kept == [0, 1]
    assert "1 of 3 prompts" in said[0]


def test_a_subset_holds_only_the_kept_rows() -> None:
    data = DataSet(Dataset.from_list(ROWS), DataSetConfig(path="d", columns={})).subset([0, 2])
    assert [row["question"] for row in data] == ["q0", "q2"]
    assert [row["question"] for row in data.subset([1])] == ["q2"]
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens"):
        data.subset([])


# Rows begun ahead of training


def test_unfinished_rows_come_first_after_a_resume() -> None:
    order = prompts()
    begun = begin(order, 6)
    order.finish(place for place, _ in begun[:3])
    order.finish([4])
    assert order.unfinished == (3, 5)
    resumed = prompts()
    resumed.restore(order.position)
    assert begin(resumed, 4) == [begun[3], begun[5], *begin(prompts(cursor=6), 2)]
    assert resumed.unfinished == (3, 5, 6, 7)


def test_unfinished_rows_not_begun_again_stay_unfinished() -> None:
    order = prompts()
    order.restore(Position(cursor=9, unfinished=(2, 5, 7)))
    order.take(2)
    assert order.unfinished == (7,)
    assert order.cursor == 9


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("prompt,answer\n1,2,3,4\n", "line 2: found 4 fields, the header has 2"),
        ("prompt,answer\n1,2,\n3,4,\n", "line 2: found 3 fields, the header has 2"),
        ("prompt,answer\na,1\nb,c,1\n", "line 3: found 3 fields, the header has 2"),
        ("prompt,prompt\na,b\n", "x.csv: the header has prompt twice"),
    ],
)
def test_fields_without_a_column_of_their_own_are_refused(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(where)):
        load_rows(str(path), "train")
    if "line 3" not in where:
        with pytest.raises(DataError, match=re.escape(where)):
            read_first_row(str(path))


def test_a_long_field_of_a_csv_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("\nprompt,answer\n" + "a" * 200_000 + "\n")
    for row in (read_first_row(str(path)), load_rows(str(path), "train")[0]):
        assert row == {"prompt": "a" * 200_000, "answer": None}


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([2**62], pyarrow.duration("s")),
        pyarrow.array([2**30], pyarrow.date32()),
        pyarrow.array([1], pyarrow.timestamp("s", tz="No/Where")),
        pyarrow.Array.from_buffers(
            pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
        ),
    ],
    ids=["duration", "date", "zone", "text"],
)
def test_a_value_that_python_cannot_hold_is_an_error_of_the_data(tmp_path: Path, column: pyarrow.Array) -> None:
    path = str(tmp_path / "x.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a"], "other": column}), path)
    with pytest.raises(DataError, match=r"x\.parquet"):
        read_first_row(path)
    with pytest.raises(DataError, match=r"x\.parquet"):
        load_data_set(DataSetConfig(path=path, split="train")).checked(lambda row: None, say=print)
