"""Checks of runs on demonstrations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.algorithm import algorithm_problems
from lockstep.trainer.checks.conversations import (
    demonstration_problems,
    demonstration_row_problems,
)
from lockstep.trainer.checks.declared import unused_problems
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.schema import Config

TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def config(path: Path, row: dict[str, Any], **algorithm: Any) -> Config:
    path.write_text(json.dumps(row) + "\n")
    made = Config(algorithm=AlgorithmConfig(**{"trains_on": "demonstrations"} | algorithm))
    made.data.path = str(path)
    return made


def problems(made: Config) -> Iterator[str]:
    return demonstration_problems(made.demonstrations, made.teacher, made.demonstration_sets().values())


def row_problems(made: Config) -> Iterator[str]:
    return demonstration_row_problems(made.demonstration_sets().values())


def test_a_run_on_conversations_has_no_problem(tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK)
    assert [*unused_problems(made), *row_problems(made)] == []


@pytest.mark.parametrize(
    "algorithm",
    [{"kl_coef": 0.1}, {"minibatches": 2}, {"advantage": "gae"}, {"entropy_target": 0.2}, {"length_control": "alp"}],
)
def test_a_setting_of_rollouts_is_refused_without_them(algorithm: dict[str, Any], tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK, **algorithm)
    (sentence,) = unused_problems(made)
    (name,) = algorithm
    assert sentence.startswith(f"algorithm.{name}=")
    assert "; set algorithm" in sentence


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "x"}, "the first row has no list of messages; it has question"),
        ({"messages": TALK["messages"][:1]}, "has no assistant turn to train"),
        ({**TALK, "calls": []}, "holds saved rollouts, whose text would be tokenized again"),
    ],
)
def test_the_first_row_must_be_a_conversation_also_of_mixed_demonstrations(
    row: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    made = config(tmp_path / "rows.jsonl", row)
    assert sentence in next(row_problems(made))
    mixed = Config()
    mixed.demonstrations.path = made.data.path
    assert sentence in next(row_problems(mixed))


def test_demonstrations_beside_rollouts_are_refused_without_rollouts(tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK)
    made.demonstrations.path = "more.jsonl"
    (sentence,) = unused_problems(made)
    assert "demonstrations.path=more.jsonl does nothing" in sentence
    assert "set algorithm=grpo" in sentence


def test_saved_rollouts_are_looked_for_before_the_run_starts(tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK)
    made.data.path = f"rollouts:{tmp_path}/teacher"
    (sentence,) = row_problems(made)
    assert "teacher has no saved rollouts" in sentence
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "samples.jsonl").write_text("")
    assert [*row_problems(made), *problems(made)] == []


@pytest.mark.parametrize("place", ["path", "heldout_path"])
def test_saved_rollouts_are_no_prompts(place: str) -> None:
    made = Config()
    setattr(made.data, place, "rollouts:runs/teacher")
    with pytest.raises(ConfigError, match=r"set algorithm=sft, or demonstrations\.path=rollouts:runs/teacher"):
        validate(made, needs_data=False)


@pytest.mark.parametrize(
    ("teacher", "sentence"),
    [
        ({}, "found teacher.path=null and teacher.source=model; set teacher.source=model teacher.path="),
        ({"source": "policy"}, "found teacher.path=null and teacher.source=policy; set teacher.source=model"),
        ({"path": "t", "source": "average"}, "found teacher.path=t and teacher.source=average"),
        ({"path": "t", "context": "hint"}, "the teacher reads demonstrations as they are; set teacher.context=null"),
    ],
)
@pytest.mark.parametrize("trains_on", ["rollouts", "demonstrations"])
def test_a_divergence_on_demonstrations_needs_a_model_that_reads_them_as_they_are(
    trains_on: str, teacher: dict[str, Any], sentence: str
) -> None:
    made = Config(algorithm=AlgorithmConfig(trains_on=trains_on), teacher=TeacherConfig(**teacher))
    made.demonstrations.teacher_divergence = "forward"
    (problem,) = problems(made)
    assert sentence in problem
    made.demonstrations.teacher_divergence = "off"
    assert not list(problems(made))


SAVED_RUN = "rollouts:runs/opd"


@pytest.mark.parametrize(
    ("demonstrations", "kind", "path", "sentence"),
    [
        (SAVED_RUN, "off", None, f"found demonstrations.teacher_divergence=off and demonstrations of {SAVED_RUN}; set"),
        (
            "talks.jsonl",
            "jsd",
            None,
            "found demonstrations.teacher_divergence=jsd and demonstrations of talks.jsonl; set",
        ),
        (None, "off", None, "found demonstrations.teacher_divergence=off and demonstrations of null; set"),
        (SAVED_RUN, "jsd", "t", "teacher.path=t does nothing with teacher.source=saved"),
    ],
)
def test_saved_scores_are_those_of_saved_rollouts(
    demonstrations: str | None, kind: str, path: str | None, sentence: str
) -> None:
    made = Config(teacher=TeacherConfig(source="saved", path=path))
    made.demonstrations.path, made.demonstrations.teacher_divergence = demonstrations, kind
    (problem,) = problems(made)
    assert sentence in problem
    made.demonstrations.path, made.demonstrations.teacher_divergence, made.teacher.path = SAVED_RUN, "jsd", None
    assert [*problems(made), *algorithm_problems(made)] == []
    made.algorithm.trains_on, made.data.path = "demonstrations", SAVED_RUN
    made.demonstrations.path = None
    assert list(unused_problems(made)) == []


def test_addresses_of_the_servers_of_a_teacher_are_checked_without_rollouts(tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK)
    made.model.path, made.demonstrations.teacher_divergence = "my/model", "jsd"
    made.teacher = TeacherConfig(path=made.model.path, urls=["http://me:secret@10.0.0.7:8000"])
    with pytest.raises(ConfigError, match=r"^teacher\.urls: .* keys belong in the environment.*teacher\.urls=\[http"):
        validate(made, needs_data=False)


def test_saved_scores_are_not_of_rollouts_that_are_sampled() -> None:
    made = Config(algorithm=AlgorithmConfig(name="opd", teacher_coef=1.0), teacher=TeacherConfig(source="saved"))
    made.demonstrations.path, made.demonstrations.teacher_divergence = SAVED_RUN, "jsd"
    (problem,) = algorithm_problems(made)
    assert problem.startswith("algorithm=opd learns from a teacher, found teacher.path=null")


def test_a_teacher_without_a_divergence_is_refused_without_rollouts(tmp_path: Path) -> None:
    made = config(tmp_path / "rows.jsonl", TALK)
    made.teacher.path = "t"
    (sentence,) = unused_problems(made)
    assert sentence.startswith("teacher.path=t does nothing with algorithm.trains_on=demonstrations")
    made.demonstrations.teacher_divergence = "jsd"
    assert not list(unused_problems(made))


def test_a_teacher_of_the_demonstrations_leaves_rollouts_to_rewards() -> None:
    """At any temperature, because it scores no rollout."""
    made = Config(teacher=TeacherConfig(path="t"))
    made.demonstrations.path = "talks.jsonl"
    assert any("is not used" in sentence for sentence in algorithm_problems(made))
    made.demonstrations.teacher_divergence = "forward"
    made.rollout.temperature = 0.7
    assert not list(algorithm_problems(made))
    assert made.has_teacher
    assert not made.plan.teaches_rollouts
