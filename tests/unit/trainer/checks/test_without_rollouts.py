"""Checks of runs on demonstrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.checks.declared import unused_problems
from trainer.checks.without_rollouts import demonstration_row_problems, without_rollouts_problems
from trainer.config.schema import AlgorithmConfig, Config

TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def config(path: Path, row: dict[str, Any], **algorithm: Any) -> Config:
    path.write_text(json.dumps(row) + "\n")
    made = Config(algorithm=AlgorithmConfig(**{"trains_on": "demonstrations"} | algorithm))
    made.data.path = str(path)
    return made


def test_a_run_on_conversations_has_no_problem(tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK)
    assert [*without_rollouts_problems(made), *demonstration_row_problems(made)] == []


@pytest.mark.parametrize(
    "algorithm",
    [{"kl_coef": 0.1}, {"minibatches": 2}, {"advantage": "gae"}, {"entropy_target": 0.2}, {"length_control": "alp"}],
)
def test_a_setting_of_rollouts_is_refused_without_them(algorithm: dict[str, Any], tmp_path: Path) -> None:
    (sentence,) = without_rollouts_problems(config(tmp_path / "rows.jsonl", TALK, **algorithm))
    (name,) = algorithm
    assert sentence.startswith(f"algorithm.{name}=")
    assert "; set algorithm." in sentence


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "x"}, "the first row has no list of messages; it has question"),
        ({"messages": TALK["messages"][:1]}, "has no assistant turn to train"),
    ],
)
def test_the_first_row_must_be_a_conversation_also_of_mixed_demonstrations(
    row: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    made = config(tmp_path / "rows.jsonl", row)
    assert sentence in next(demonstration_row_problems(made))
    mixed = Config()
    mixed.demonstrations.path = made.data.path
    assert sentence in next(demonstration_row_problems(mixed))


def test_demonstrations_beside_rollouts_are_refused_without_rollouts(tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK)
    made.demonstrations.path = "more.jsonl"
    (sentence,) = unused_problems(made)
    assert "demonstrations.path=more.jsonl does nothing" in sentence
    assert "set algorithm=grpo" in sentence
