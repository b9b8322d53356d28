"""Rows of `data.path=reasoning_gym:<task>`: deterministic, without repetition, with held-out questions of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.rewards.composition import make_reward_set
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.data.gym_rows import gym_rows
from lockstep.trainer.data.prompts import Prompts, heldout_data, training_data
from lockstep.trainer.data.split import HELDOUT_ONE_IN
from tests.fixtures.paths import ROOT
from tests.unit.trainer.data.test_ready_data import composed

pytestmark = pytest.mark.long

pytest.importorskip("reasoning_gym", reason="pip install 'lockstep-rl[reasoning-gym]'")

BY_HASH = "isomorphic_strings"
"""A task whose entries depend on the order of a set, and so on the seed of Python's hashes."""


def test_no_question_is_in_two_rows_and_the_splits_have_none_in_common() -> None:
    train, heldout = (gym_rows("reasoning_gym:products", split, {"size": 400}) for split in ("train", "test"))
    assert len(train) + len(heldout) == 400
    assert 400 / HELDOUT_ONE_IN / 2 < len(heldout) < 400 / HELDOUT_ONE_IN * 2
    other = gym_rows("reasoning_gym:products", "test", {"size": 400, "seed": 200})
    trained, held, others = ({row["question"] for row in rows} for rows in (train, heldout, other))
    assert len(trained | held) == 400
    assert not trained & others, "whatever the seeds"
    assert held != others


def test_another_process_draws_the_same_rows() -> None:
    program = (
        "import sys; from lockstep.trainer.data.gym_rows import gym_rows; "
        f"print(gym_rows('reasoning_gym:{BY_HASH}', 'train', {{'size': 40}}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    }
    assert texts == {str(gym_rows(f"reasoning_gym:{BY_HASH}", "train", {"size": 40}))}


def test_parameters_and_seed_change_the_rows() -> None:
    rows = {
        str(parameters): tuple(
            row["question"] for row in gym_rows("reasoning_gym:products", "train", {"size": 20, **parameters})
        )
        for parameters in ({}, {"seed": 7}, {"min_terms": 3, "max_terms": 3})
    }
    assert len(set(rows.values())) == 3
    assert all(question.count("*") == 2 for question in rows["{'min_terms': 3, 'max_terms': 3}"])


async def test_a_run_reads_rows_of_two_tasks_and_their_own_scorers_score_them(tmp_path: Path) -> None:
    config = composed(
        "environment=single_turn",
        "reward=reasoning_gym",
        "data.sources={a: {path: reasoning_gym:leg_counting}, b: {path: reasoning_gym:products, "
        "parameters: {max_digits: 1, size: 30}}}",
        "data.parameters={size: 60}",
        "data.heldout_path=null",
        "eval.sets={legs: {path: reasoning_gym:leg_counting}}",
        "eval.every=1",
    )
    sets = training_data(config.data, config.environment, config.reward)
    assert [len(data) > 0 for data in sets] == [True, True]
    rows = Prompts(sets, seed=0, shuffle=True).take(8)
    again = Prompts(sets, seed=0, shuffle=True)
    again.take(4)
    assert again.take(4) == rows[4:], "a resumed run reads on"
    rollouts = [
        Rollout(
            rollout_id=index,
            group_id=index,
            calls=(),
            example=row,
            messages=({"role": "assistant", "content": row["answer"] if index % 2 else "I do not know"},),
            reward=0.0,
        )
        for index, row in enumerate(rows)
    ]
    rewards = make_reward_set(config.reward.functions)
    try:
        scored = await rewards.score(rollouts)
    finally:
        rewards.close()
    assert [rollout.reward for rollout in scored] == [0.0, 1.0] * 4
    assert {json.loads(row["reasoning_gym"])["task"] for row in rows} == {"leg_counting", "products"}
    (heldout,) = heldout_data(config.heldout_sets(), config.environment, config.reward).values()
    assert not {row["question"] for row in rows} & {heldout[index]["question"] for index in range(len(heldout))}


def test_the_group_of_settings_holds_a_heldout_set_of_the_same_task(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = composed(
        "data=reasoning_gym",
        "data.path=reasoning_gym:leg_counting",
        "data.parameters={max_animals: 3}",
        "environment=single_turn",
        "reward=reasoning_gym",
        f"model.path={tmp_path}",
    )
    validate(config)
    assert config.data.heldout_path == "reasoning_gym:leg_counting"
    assert config.heldout_sets()[""].parameters == {"max_animals": 3}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["data.path=reasoning_gym:product"], r"no such task \(did you mean products\?\)"),
        (["data.path=reasoning_gym:products", "data.parameters={min_term: 1}"], "has no parameter min_term"),
        (["data.path=reasoning_gym:products", "data.parameters={size: 0}"], "size=0 must be a whole number from 1"),
        (["data.path=reasoning_gym:products", "data.parameters={seed: x}"], "seed='x' must be a whole number"),
        (["data.path=d.jsonl", "data.parameters={size: 3}", "reward.functions=[exact_match]"], "is for tasks of"),
        (["data.path=d.jsonl"], "the reward reasoning_gym needs column 'reasoning_gym'"),
        (["data.path=seeds:4"], "the reward reasoning_gym scores rows of data.path=reasoning_gym:<task>"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    settings: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "d.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    base = ["environment=single_turn", "reward=reasoning_gym", "data.heldout_path=null", "eval.every=0"]
    with pytest.raises(ConfigError, match=problem):
        validate(composed(*base, *settings, f"model.path={tmp_path}"))


def test_another_split_and_a_task_with_too_few_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match="has the splits train and test, found 'validation'"):
        gym_rows("reasoning_gym:products", "validation", {})
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 500}
    with pytest.raises(ConfigError, match=r"too few different questions: \d+ of 500 in 10000 draws; set data.param"):
        gym_rows("reasoning_gym:products", "train", few)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"reasoning-gym is missing.*pip install 'lockstep-rl\[reasoning-gym\]'"):
        gym_rows("reasoning_gym:products", "train", {})
