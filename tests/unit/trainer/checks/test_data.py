"""Missing data files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.trainer.checks.data import data_file_problems, data_problems, evaluation_problems
from lockstep.trainer.config.schema import Config
from tests.fixtures.composed import demo as composed


def file_problems(config: Config, *, trains: bool) -> Iterator[str]:
    return data_file_problems(config.data, config.eval, config.demonstrations, config.environment.name, trains=trains)


def eval_problems(config: Config, *, trains: bool = True) -> Iterator[str]:
    has_data = bool(config.heldout_sets())
    return evaluation_problems(config.eval, config.reward.functions, has_data=has_data, trains=trains)


def test_a_missing_held_out_file_can_be_left_out_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    missing = {problem.partition("=")[0]: problem for problem in file_problems(composed(), trains=True)}
    assert missing["data.heldout_path"].endswith("or data.heldout_path=null for no held-out data")
    assert "null" not in missing["data.path"]
    (problem,) = file_problems(composed(), trains=False)
    assert "null" not in problem, "an evaluation needs held-out data"


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("data/demo/chain/train.jsonl", "run `lockstep make-demo-model --task chain`"),
        ("data/demo/chain/demonstrations.jsonl", "run `lockstep make-demonstrations --task chain`"),
        ("data/real/family/train.jsonl", "run `lockstep make-real-model --task family`"),
        ("mine/real/family/train.jsonl", None),
        ("data/real/family/train_2.jsonl", None),
        ("data/real/family/demonstrations.jsonl", None),
    ],
)
def test_missing_prepared_data_names_the_command_that_makes_them(
    path: str, command: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = composed(f"data.path={path}", "data.heldout_path=null")
    (problem,) = file_problems(config, trains=True)
    assert (command or "set data.path=") in problem
    assert ("run `" in problem) == (command is not None)


def test_rewards_of_groups_alone_need_several_samples_in_evaluations():
    alone = ["reward.functions=[majority_vote,novelty]", "data.heldout_path=a.jsonl"]
    (problem,) = eval_problems(composed(*alone, "eval.every=5"))
    assert "set eval.samples_per_prompt=8 eval.temperature=1.0, or 'reward.functions=[majority_vote,exact" in problem
    assert list(eval_problems(composed(*alone), trains=False)) == [problem]
    measured = ["reward.functions=[majority_vote,exact_match]", "reward.weights=[1,0]", "data.heldout_path=a.jsonl"]
    for accepted in (
        alone,
        [*alone, "eval.every=5", "eval.samples_per_prompt=8", "eval.temperature=1.0"],
        [*measured, "eval.every=5"],
    ):
        assert not list(eval_problems(composed(*accepted))), accepted


def test_every_way_to_evaluate_is_turned_off_by_one_line():
    settings = ["data.heldout_path=null", "eval.every=5", "eval.before_training=true"]
    (problem,) = eval_problems(composed(*settings))
    assert problem.endswith("or eval.every=0 eval.before_training=false")
    assert "eval.before_training=true need held-out" in problem
    assert not list(eval_problems(composed(*settings, "eval.every=0", "eval.before_training=false")))


@pytest.mark.parametrize(
    ("name", "parts", "is_refused"),
    [
        ("textarena", None, True),
        ("tools", None, False),
        ("mine.py:Own", None, False),
        ("mixed", ["openenv", "mixed"], True),
        ("mixed", ["openenv", "tools"], False),
        ("mixed", ["mine.py:Own"], False),
        ("toolz", None, False),
    ],
)
def test_prompts_are_measured_where_some_environment_reads_them(name: str, parts: list[str] | None, is_refused: bool):
    config = Config()
    config.data.max_prompt_tokens, config.environment.name = 9, name
    if parts is not None:
        config.environment.settings = {"environments": {part: {} for part in parts}}
    problems = data_problems(config.data, config.eval.sets, config.environment)
    assert sum("max_prompt_tokens" in problem for problem in problems) == is_refused


def test_held_out_data_of_an_environment_that_has_none_is_refused():
    words = ["data.heldout_path=environment", "data.path=seeds:9"]
    (problem,) = file_problems(composed("environment=search", *words), trains=True)
    assert problem.startswith("data.heldout_path=environment: environment search brings no held-out data; set ")
    assert not list(file_problems(composed("environment=verifiers", *words), trains=True))
