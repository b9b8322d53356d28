"""The settings file that `lockstep init` proposes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.rollout.errors import ConfigError
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
    assert values["reward"]["functions"] == reward
    assert len(left_open) == 1 + (not reward), "the model is never guessed"
    assert values["model"]["path"] == ""
    assert "columns" not in values["data"]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"problem": "p", "solution": "4"}, {"prompt": "problem", "answer": "solution"}),
        ({"no": "p", "label": "4"}, {"prompt": "no", "answer": "label"}),
        ({"prompt": "p", "ground_truth": "4", "label": "x"}, {"answer": "ground_truth"}),
        ({"a": "p", "b": "q", "answer": "4"}, None),
        ({"a\n: b": "p", "answer": "4"}, {"prompt": "a\n: b"}),
        ({"😀\x7f\x85\u2028": "p", "answer": "4"}, {"prompt": "😀\x7f\x85\u2028"}),
    ],
)
def test_columns_of_other_names_are_renamed(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str] | None
) -> None:
    values, left_open = propose(tmp_path, row, row)
    assert values["data"].get("columns") == columns
    assert any("prompt" in line for line in left_open) == (columns is None)


def test_held_out_rows_beside_the_data_are_found_and_paths_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"question": "q", "answer": "4"}\n')
    values, _ = propose(tmp_path, {"question": "q", "answer": "4"})
    assert (values["data"]["path"], values["data"]["heldout_path"]) == ("train.jsonl", "test.jsonl")
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_starter(str(tmp_path / "train.jsonl"), tmp_path / "run.yaml")
    below = tmp_path / "runs.yaml"
    write_starter(str(tmp_path / "test.jsonl"), below)
    assert yaml.safe_load(below.read_text())["data"]["heldout_path"] is None


def test_demonstrations_are_named_as_such(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(ConfigError, match="demonstrations; train on them with algorithm=sft"):
        propose(tmp_path, {"messages": turns})
