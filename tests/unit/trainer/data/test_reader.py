"""Reader of data: the values of the file in every format, rows that are refused with their places, and columns."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lockstep.rollout.errors import DataError
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.datasets import load_rows, path_problem, read_first_row
from lockstep.trainer.data.prompts import load_data_set
from lockstep.trainer.data.reader import MAX_DEPTH, SHOWN_ROWS

TEXTS = st.text() | st.sampled_from(["2024-01-01", "00501", "1.10", "NA", "null", "true", " 5 ", "1e5", "\ud800", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**80), 2**80) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), min_size=1, max_size=4)
CELLS = st.text(st.characters(codec="utf-8")) | TEXTS.filter(str.isascii)
DEEP = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)


def read(path: Path) -> list[dict[str, Any]]:
    rows = load_rows(str(path), "train")
    found = [rows[index] for index in range(len(rows))]
    assert repr(read_first_row(str(path))) == repr(found[0]), "the check of the first row sees another one"
    return found


def refused(path: Path) -> str:
    with pytest.raises(DataError) as error:
        load_rows(str(path), "train")
    return str(error.value)


# repr tells 1 from 1.0 and from True, and NaN equals NaN.


@settings(max_examples=60)
@given(rows=ROWS, style=st.sampled_from([".jsonl", ".json", "lines.json"]), bom=st.booleans(), crlf=st.booleans())
@example(rows=[{"a": "2024-01-01"}, {"a": "2024-01-02"}], style=".jsonl", bom=False, crlf=False)
@example(rows=[{"a": 2}, {"a": 4.5}, {}, {"a": 2**63}], style=".jsonl", bom=True, crlf=True)
@example(rows=[{"a": math.nan, "b": -math.inf, "c": "\ud83d", "d": None}], style=".json", bom=True, crlf=False)
def test_json_has_the_values_that_json_reads(
    rows: list[dict[str, Any]], style: str, bom: bool, crlf: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("json") / f"rows{style}"
    end = "\r\n" if crlf else "\n"
    text = json.dumps(rows, indent=1) if style == ".json" else "".join(json.dumps(row) + end for row in rows)
    path.write_bytes(text.encode("utf-8-sig" if bom else "utf-8"))
    expected = json.loads(text) if style == ".json" else [json.loads(line) for line in text.split("\n") if line.strip()]
    assert repr(read(path)) == repr(expected)


@settings(max_examples=60)
@given(cells=st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1, max_size=4), bom=st.booleans())
@example(cells=[["1", "5"], ["2", ""]], bom=True)
@example(cells=[["00501", "1.10"], ["NA", "null"], ["True", "2024-01-01"], ["a\r\nb", 'say "hi", ok']], bom=False)
def test_csv_has_the_texts_that_csv_reads(
    cells: list[list[str]], bom: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    written = io.StringIO(newline="")
    csv.writer(written).writerows([["prompt", "answer"], *cells])
    path.write_bytes(written.getvalue().encode("utf-8-sig" if bom else "utf-8"))
    assert read(path) == list(csv.DictReader(io.StringIO(written.getvalue(), newline="")))


def test_a_value_of_another_type_late_in_a_large_file_changes_nothing(tmp_path: Path) -> None:
    """Readers that guess types guess them per chunk."""
    (tmp_path / "a.csv").write_text("prompt,answer\n" + "x,1\n" * 12_000 + "y,text\n")
    assert read(tmp_path / "a.csv")[-1] == {"prompt": "y", "answer": "text"}
    lines = ['{"prompt": "%s", "answer": 1}\n' % ("x" * 2000)] * 6000 + ['{"answer": "text", "new": [1]}\n']
    (tmp_path / "a.jsonl").write_text("".join(lines))
    found = read(tmp_path / "a.jsonl")
    assert (found[0]["answer"], found[-1]) == (1, {"answer": "text", "new": [1]})


def test_a_row_is_made_again_at_each_access(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": [1]}\n')
    rows = load_rows(str(tmp_path / "a.jsonl"), "train")
    rows[0]["a"].append(2)
    assert rows[0] == {"a": [1]}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n{"b": 2}\nx\n', ["2 of 4 rows", "line 3: found no JSON", "line 5: found no"]),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "a": 2}\n', ["1 of 2 rows", "line 2: an object has the key 'a' twice"]),
        ("a.jsonl", '{"a": 1}\n{"b": {"c": [{"a": 1, "a": 2}]}}\n', ["line 2: an object has the key 'a' twice"]),
        ("a.jsonl", '{"a": 1}\n{"a": ' + DEEP + "}\n", ["line 2: it has more than 100 lists and objects inside"]),
        ("a.jsonl", '{"a": 1}\n{"a": %s}\n' % ("[" * 100_000), ["line 2: it has more than 100 lists"]),
        ("a.jsonl", '{"a": 1}\n{"a": %s}\n' % ("1" * 5000), ["line 2: it cannot be read: Exceeds the limit"]),
        ("a.jsonl", '{"a": 1} {"a": 2}\n', ["line 1: found no JSON: Extra data"]),
        ("a.jsonl", "3\nnull\n", ["line 1: found 3, expected a JSON object", "line 2: found null, expected"]),
        ("a.json", '[{"a": 1}, 3, {"a": 1, "a": 2}]', ["2 of 3 rows", "row 1: found 3", "row 2: an object has"]),
        ("a.json", '[{"a": 1},\n{"a": }]', ["found no JSON: Expecting value at line 2, character 7"]),
        ("a.json", '[{"a": 1}', ["found no JSON: Expecting ',' delimiter"]),
        ("a.csv", "a,b\n1,2\n3,4,5\n6,7,8\n", ["2 of 3 rows", "line 3: found 3 fields, the header has 2", "line 4"]),
        ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', ["line 4: unexpected end of data; write quotes inside of quotes twice"]),
        ("a.csv", "a,a\n1,2\n", ["the header has a twice"]),
        ("a.csv", "prompt;answer\na;1\n", ["one column, 'prompt;answer'; expected columns with commas"]),
        ("a.csv", "prompt\tanswer\na\t1\n", ["one column, 'prompt\\tanswer'"]),
    ],
)
def test_rows_that_cannot_be_read_are_counted_with_their_places(
    name: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    sentence = refused(tmp_path / name)
    assert all(part in sentence for part in [name, *expected]), sentence


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_text_that_is_not_utf_8_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('{"a": 1}\n{"a": "é"}\n'.encode("latin-1"))
    assert "line 2: found byte 0xe9, which is not UTF-8; save the file as UTF-8" in refused(tmp_path / name)


def test_of_many_refused_rows_the_first_are_quoted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("x\n" * 1234 + "{}\n")
    sentence = refused(tmp_path / "a.jsonl")
    assert "1,234 of 1,235 rows cannot be used" in sentence
    assert f"and {1234 - SHOWN_ROWS:,} more" in sentence
    assert len(sentence.splitlines()) == SHOWN_ROWS + 2


# Columns of tables


def write_table(path: Path, **columns: Any) -> DataSetConfig:
    parquet.write_table(pyarrow.table(columns), path)
    return DataSetConfig(path=str(path), split="train")


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["prompt", "prompt"]), "has column prompt twice"),
        (pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), "has no rows"),
        (
            pyarrow.table(
                {"prompt": ["a"], "m": pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))}
            ),
            "column m has the type map<string, int64",
        ),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_the_name_of_the_column(
    table: pyarrow.Table, says: str, tmp_path: Path
) -> None:
    parquet.write_table(table, tmp_path / "a.parquet")
    assert says in refused(tmp_path / "a.parquet")


def test_parquet_has_the_values_of_the_types_of_the_file(tmp_path: Path) -> None:
    columns = {
        "prompt": ["a", "b"],
        "whole": [2**62, None],
        "number": [0.1, math.inf],
        "large": pyarrow.array([2**64 - 1, 0], pyarrow.uint64()),
        "half": pyarrow.array([1.5, 2], pyarrow.float32()),
        "object": [{"a": 1, "b": None}, None],
        "list": [[1], []],
        "category": pyarrow.array(["x", "x"]).dictionary_encode(),
        "date": ["2024-01-01", "00501"],
    }
    data = load_data_set(write_table(tmp_path / "a.parquet", **columns))
    assert repr([data[0], data[1]]) == repr(pyarrow.table(columns).to_pylist())
    assert read_first_row(str(tmp_path / "a.parquet")) == data[0]


@pytest.mark.parametrize(
    "value",
    [datetime.datetime(2024, 1, 1), datetime.date(2024, 1, 1), Decimal("1.10"), b"x", datetime.timedelta(1)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [value], lambda value: {"at": value}])
def test_a_type_that_json_does_not_have_is_refused_by_the_name_of_its_column(
    value: Any, wrap: Any, tmp_path: Path
) -> None:
    settings = write_table(tmp_path / "a.parquet", prompt=["a"], when=[wrap(value)])
    with pytest.raises(DataError, match=r"a\.parquet: column when has the type .*set 'data\.columns=\{when: null\}'"):
        load_data_set(settings)
    settings.columns = {"when": None}
    assert load_data_set(settings)[0] == {"prompt": "a"}


def test_null_leaves_out_a_column_of_every_format(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "x": 1}\n{"prompt": "b"}\n')
    data = load_data_set(DataSetConfig(path=str(tmp_path / "a.jsonl"), split="train", columns={"x": None}))
    assert list(data) == [{"prompt": "a"}, {"prompt": "b"}]


# Directories and the hub


def test_json_and_csv_of_a_directory_have_the_values_of_their_files(tmp_path: Path) -> None:
    """As those of the hub, whose loader would guess types."""
    lines = {"train": '{"a": "2024-01-01", "b": 2}\n{"a": "2024-01-02", "b": 4.5}\n', "test": '{"a": "x"}\n'}
    (tmp_path / "json").mkdir()
    (tmp_path / "csv").mkdir()
    for split, text in lines.items():
        (tmp_path / "json" / f"{split}.jsonl").write_text(text)
        (tmp_path / "csv" / f"{split}.csv").write_text("a,b\n00501,\n")
    for split, text in lines.items():
        rows = load_rows(str(tmp_path / "json"), split)
        assert repr([rows[index] for index in range(len(rows))]) == repr(list(map(json.loads, text.splitlines())))
    assert load_rows(str(tmp_path / "csv"), "train")[0] == {"a": "00501", "b": ""}
    with pytest.raises(DataError, match=r"found split=validation .*expected split=train or test"):
        load_rows(str(tmp_path / "json"), "validation")
    (tmp_path / "json" / "test.jsonl").write_text('{"a": 1}\n{"a": 1, "a": 2}\n')
    with pytest.raises(DataError, match=r"1 of 2 rows .*\n  test\.jsonl, line 2: an object has the key"):
        load_rows(str(tmp_path / "json"), "test")


@pytest.fixture
def without_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let no server answer, and return an empty cache of the hub."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_hub_that_does_not_answer_is_named_at_once(without_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: pytest.fail("it would retry for half a minute"))
    with pytest.raises(DataError, match=r"owner/name: .*the hub cannot be reached.*set data\.path=<file>, or type"):
        load_rows("owner/name", "train")


def test_without_the_hub_its_cache_is_read(without_hub: Path) -> None:
    cached = without_hub / "datasets--owner--name"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc" / "train.jsonl").write_text('{"a": "2024-01-01"}\n')
    assert load_rows("owner/name", "train")[0] == {"a": "2024-01-01"}


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("x.txt", "has the format .txt, which is not read; expected .jsonl, .json, .csv, .parquet"),
        ("x.py", "has the format .py"),
        ("dir/x.tsv", "has the format .tsv"),
        ("rows.jsonl.gz", "has the format .gz"),
        ("none.jsonl", "does not exist (looked in"),
        ("/data/none", "is not a directory (looked in"),
        ("a/b/c", "is not a directory (looked in"),
        ("./rows", "is not a directory (looked in"),
        ("", "is not a directory (looked in"),
    ],
)
def test_a_path_that_cannot_be_read_says_why(path: str, sentence: str) -> None:
    assert sentence in (path_problem(path) or "")
    with pytest.raises(DataError, match="data set"):
        load_rows(path, "train")


@pytest.mark.parametrize(
    "path", ["openai/gsm8k", "squad", "teknium/OpenHermes-2.5", "a.jsonl", "A.CSV", "seeds:5", "rollouts:runs/x", "."]
)
def test_other_paths_may_be_read(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "A.CSV"):
        (tmp_path / name).touch()
    assert path_problem(path) is None
