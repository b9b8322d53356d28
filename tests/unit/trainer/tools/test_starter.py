"""The settings file that `lockstep init` proposes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from PIL import Image

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.data import first_row_problems
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig, RewardConfig
from lockstep.trainer.data.row_check import RowCheck
from lockstep.trainer.settings_file import fit
from lockstep.trainer.tools.starter import write_starter


def propose(folder: Path, *rows: dict[str, Any], name: str = "train.jsonl") -> tuple[dict[str, Any], list[str]]:
    """Write rows and a file for them; return its values and what it leaves open."""
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = folder / "run.yaml"
    left_open = write_starter(str(folder / name), out)
    values = yaml.safe_load(out.read_text())
    fit(values, out)  # as `lockstep train` checks it
    return values, left_open


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([1, "2.5", "so 3\n#### 3"], ["numeric"]),
        ([r"\frac{a}{2}", "x^{2}"], ["math_equal"]),
        (["Paris", "New York"], ["exact_match"]),
        (["Paris", "a b c d " * 20], []),
        ([["Paris"], ["Rome"]], []),
        (["Paris", 4], []),
    ],
)
def test_the_reward_fits_every_reference(tmp_path: Path, answers: list[Any], reward: list[str]) -> None:
    values, left_open = propose(tmp_path, *({"question": f"q{i}", "answer": one} for i, one in enumerate(answers)))
    assert values.get("reward", {"functions": []})["functions"] == reward
    assert len(left_open) == 1 + (not reward), "the model is never guessed"
    assert "model" not in values
    assert "columns" not in values["data"]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"problem": "p", "solution": "4"}, {"prompt": "problem", "answer": "solution"}),
        ({"no": "p", "label": "4"}, {"answer": "label"}),
        ({"Client": "p", "Question": "q", "Result": "4"}, {"prompt": "Question", "answer": "Result"}),
        ({"prompt": "p", "ground_truth": "4", "label": "x"}, {"answer": "ground_truth"}),
        ({"a": "p", "b": "q", "answer": "4"}, None),
        ({"a\n: b": "p", "result": "4"}, {"answer": "result"}),
        ({"😀\x7f\x85\u2028": "p", "answer": "4"}, None),
    ],
)
def test_columns_of_other_names_are_renamed(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str] | None
) -> None:
    values, left_open = propose(tmp_path, row, row)
    assert values["data"].get("columns") == columns
    names_prompt = "question" in row or "prompt" in row or "prompt" in (columns or {})
    assert any("prompt" in line for line in left_open) == (not names_prompt)


def test_a_column_with_a_few_empty_cells_is_proposed_and_the_gaps_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"client": f"c{i}", "Question": f"q{i}", "answer": str(i)} for i in range(30)]
    rows[3]["Question"], rows[4]["answer"], rows[5]["answer"], rows[6]["answer"] = "", " ", None, ""
    values, left_open = propose(tmp_path, *rows)
    assert values["data"]["columns"] == {"prompt": "Question"}
    assert values["reward"]["functions"] == ["numeric"]
    assert [line.partition(":")[0] for line in left_open] == ["path"]
    text = (tmp_path / "run.yaml").read_text()
    assert "1 of 30 rows are empty" in text
    assert "3 of 30 rows are empty" in text


def test_a_column_with_many_empty_cells_is_named_and_no_other_takes_its_place(tmp_path: Path) -> None:
    rows = [
        {"client": f"c{i}", "Question": f"q{i}" if i % 2 else "", "answer": "" if i % 3 else "4"} for i in range(30)
    ]
    values, left_open = propose(tmp_path, *rows)
    assert "columns" not in values["data"]
    assert "reward" not in values
    assert any("column Question has gaps; 15 of 30 rows are empty" in line for line in left_open)
    assert "column answer has gaps; 20 of 30 rows are empty" in (tmp_path / "run.yaml").read_text()


def test_a_prompt_by_elimination_is_left_open_with_its_name(tmp_path: Path) -> None:
    _, left_open = propose(tmp_path, {"client": "Ms. A", "answer": "4"}, {"client": "Mr. B", "answer": "5"})
    assert any("it may be client" in line for line in left_open)


@pytest.mark.parametrize(("positions", "context", "answer"), [(512, 512, 256), (32768, 2048, 512), (None, 2048, 512)])
def test_limits_fit_together_and_into_the_context_of_the_model(
    tmp_path: Path, positions: int | None, context: int, answer: int
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "4"}\n')
    out = tmp_path / "run.yaml"
    assert write_starter(str(tmp_path / "rows.jsonl"), out, model=str(tmp_path / "model")) == []
    rollout = yaml.safe_load(out.read_text())["rollout"]
    assert (rollout["max_model_len"], rollout["max_tokens_per_turn"]) == (context, answer)


def test_held_out_rows_beside_the_data_are_found_and_paths_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "q", "answer": "4"}\n')
    values, _ = propose(tmp_path, {"question": "q", "answer": "4"})
    assert (values["data"]["path"], values["data"]["heldout_path"]) == ("train.jsonl", "test.jsonl")
    assert values["eval"] == {"every": 20, "before_training": True}, "the rows that are proposed are used"
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_starter(str(tmp_path / "train.jsonl"), tmp_path / "run.yaml")
    below = tmp_path / "runs.yaml"
    write_starter(str(tmp_path / "test.jsonl"), below)
    values = yaml.safe_load(below.read_text())
    assert (values["data"]["heldout_path"], values.get("eval")) == (None, None)


def test_demonstrations_are_named_as_such(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ConfigError, match="demonstrations; train on them with algorithm=sft"):
        propose(tmp_path, {"messages": turns})


@pytest.mark.parametrize(
    ("rows", "most", "columns"),
    [
        ([{"image": "a.png"}, {"image": "b.jpg"}], 1, None),
        ([{"images": []}, {"images": ["a.png", "data:image/png;base64,aa"]}, {"images": ["c.PNG"]}], 2, None),
        ([{"picture": {"bytes": None, "path": "a.png"}}], 1, {"images": "picture"}),
        ([{"picture": [{"image": "a.png"}] * 3, "mask": "b.png"}], 3, {"images": "picture", "mask": None}),
        ([{"page": "a.html"}], None, None),
        ([{"image": "ubuntu:22.04"}], None, None),
    ],
)
def test_images_are_found_and_counted(
    tmp_path: Path, rows: list[dict[str, Any]], most: int | None, columns: dict[str, str | None] | None
) -> None:
    values, left_open = propose(tmp_path, *({"problem": "q", "answer": "4", **row} for row in rows))
    assert values.get("model") == (most and {"images": {"max_per_prompt": most}})
    assert values["data"]["columns"] == {"prompt": "problem", **(columns or {})}
    assert len(left_open) == 1


def test_images_of_messages_are_counted(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "or"}, {"type": "image"}]
    values, _ = propose(tmp_path, {"messages": [{"role": "user", "content": parts}], "image": "b.png", "answer": "4"})
    assert values["model"]["images"] == {"max_per_prompt": 2}


def test_a_path_of_an_image_is_not_a_prompt(tmp_path: Path) -> None:
    _, left_open = propose(tmp_path, {"words": "q", "image": "b.png", "answer": "4"})
    assert any("it may be words, the only text beside the reference" in line for line in left_open)


def test_the_first_row_of_a_proposal_with_images_is_used(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, format="PNG")
    rows = [{"question": "what?", "scan": {"bytes": file.getvalue(), "path": None}, "answer": "4"}]
    datasets.Dataset.from_list(rows).cast_column("scan", datasets.Image()).to_parquet(tmp_path / "train.parquet")
    write_starter(str(tmp_path / "train.parquet"), tmp_path / "run.yaml")
    values = yaml.safe_load((tmp_path / "run.yaml").read_text())
    check = RowCheck(
        EnvironmentConfig(**values["environment"]),
        RewardConfig(**values["reward"]),
        max_images=values["model"]["images"]["max_per_prompt"],
    )
    sets = [DataSetConfig(path=str(tmp_path / "train.parquet"), columns=values["data"]["columns"])]
    assert list(first_row_problems(sets, check, heldout_path=None)) == []
