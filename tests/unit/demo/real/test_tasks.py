"""The rows of the real tasks: deterministic, disjoint, and rewarded as reasoning-gym scores them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.demo.real import tasks
from lockstep.demo.real.tasks import TASKS, make_data, make_rows
from lockstep.rewards.composition import make_reward_set
from lockstep.rewards.functions.reasoning_gym import make_task
from lockstep.rollout.environments import make_environment
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout
from scripts.make_real_model import main
from tests.fixtures.paths import ROOT
from tests.unit.trainer.data.test_ready_data import composed

NAMES = sorted(TASKS)


@pytest.fixture(autouse=True)
def _needs_reasoning_gym(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name and "names" not in request.node.name:
        pytest.importorskip("reasoning_gym")


def rows_of(name: str, *, seed: int = 0, train: int = 120, heldout: int = 16) -> dict[str, list[dict[str, Any]]]:
    return make_rows(TASKS[name], seed=seed, train=train, heldout=heldout)


def question(row: dict[str, Any]) -> str:
    return row["messages"][-1]["content"]


def experiment(name: str) -> str:
    return "real" if name == tasks.DEFAULT else f"real_{name}"


@pytest.mark.parametrize("name", NAMES)
def test_rows_depend_on_the_seed_alone(name: str) -> None:
    assert rows_of(name) == rows_of(name)
    assert rows_of(name) != rows_of(name, seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_no_question_is_in_two_rows_or_in_an_example_whatever_the_seeds(name: str) -> None:
    files = rows_of(name)
    asked = [question(row) for rows in files.values() for row in rows]
    examples = {turn["content"] for turn in files["train.jsonl"][0]["messages"][:-1] if turn["role"] == "user"}
    assert len({*asked, *examples}) == len(asked) + len(examples)
    trained = {question(row) for seed in range(3) for row in rows_of(name, seed=seed)["train.jsonl"]}
    for seed in range(3):
        assert not trained & {question(row) for row in rows_of(name, seed=seed)["heldout.jsonl"]}


@pytest.mark.parametrize("name", NAMES)
async def test_the_reward_is_the_score_of_reasoning_gym(name: str) -> None:
    """On right answers, wrong answers and no answers of real rows."""
    task = TASKS[name]
    config = composed(f"experiment={experiment(name)}", "model.path=x")
    data = make_task(task.generator, task.settings, seed=0, size=120)
    entries = {str(entry["question"]): entry for entry in (data[index] for index in range(120))}
    rows = rows_of(name, train=24, heldout=2)["train.jsonl"]
    wrong = rows[1:] + rows[:1]
    rollouts, expected = [], []
    for row, other in zip(rows, wrong, strict=True):
        for answer in (row["answer"], other["answer"], "I do not know", ""):
            turns = (*row["messages"], {"role": "assistant", "content": answer})
            rollouts.append(
                Rollout(rollout_id=len(rollouts), group_id=0, calls=(), example=row, messages=turns, reward=0.0)
            )
            expected.append(float(data.score_answer(answer, entries[question(row)]) == 1.0))
    rewards = make_reward_set(config.reward.functions)
    try:
        scored = await rewards.score(rollouts)
    finally:
        rewards.close()
    assert [rollout.error for rollout in scored] == [None] * len(scored)
    assert [rollout.reward for rollout in scored] == expected
    assert expected[::4] == [1.0] * len(rows)
    assert 0.0 in expected[1::4]


def test_every_answer_of_the_family_task_follows_from_its_story() -> None:
    """A couple and its child, who may be married: the first couple names the husband first."""
    couple = r"(\w+) is married to (\w+)\."
    story = re.compile(rf"(?:(\w+) is married to \w+\. )?{couple} They have a child called (\w+)\.")
    relation = re.compile(r"(?:What is|What relation is|How is) (\w+) (?:related )?to (\w+)\?")
    files = rows_of("family", train=400)
    checked = 0
    for row in [row for rows in files.values() for row in rows]:
        turns = [turn["content"] for turn in row["messages"]] + [row["answer"]]
        for text, answer in zip(turns[::2], turns[1::2], strict=True):
            told, asked = story.search(text), relation.search(text)
            assert told is not None, text
            assert asked is not None, text
            _, one, other, child = told.groups()
            first, second = asked.groups()
            if {first, second} == {one, other}:
                right = {"husband", "wife"}
            elif second == child and first in (one, other):
                right = {"father", "mother"}
            elif first == child and second in (one, other):
                right = {"son", "daughter"}
            else:  # the child and who is married to it
                assert child in (first, second), text
                right = {"husband", "wife"}
            assert answer in right, (text, answer)
            checked += 1
    examples = [turn["content"] for turn in files["train.jsonl"][0]["messages"][1:-1:2]]
    assert sorted(examples) == ["father", "husband", "mother", "son", "wife"], "one example of each answer"
    assert checked == 416 * 6


async def test_the_examples_of_the_calculator_call_it_and_its_results_are_the_answers() -> None:
    *shots, asked = rows_of("calculator")["train.jsonl"][0]["messages"]
    assert len(shots) == 12, "three worked calls of four messages"
    assert asked["role"] == "user"
    environment = make_environment("calculator")
    for start in range(0, len(shots), 4):
        user, call, result, answer = shots[start : start + 4]
        await environment.reset({"question": user["content"]})
        step = await environment.step(call)
        assert step.messages[0]["content"] == result["content"] == answer["content"]
        assert not step.done


def test_a_task_with_too_few_questions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "DRAWS", 3)
    with pytest.raises(ConfigError, match=r"too few different questions: \d+ of 120 rows for train.jsonl.*in 60 draws"):
        rows_of(tasks.DEFAULT)


def test_a_second_call_writes_nothing_and_a_damaged_set_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert make_data(tasks.DEFAULT, folder)
    written = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(written) == ["heldout.jsonl", "recipe.json", "train.jsonl"]
    assert [len(written[name].splitlines()) for name in ("train.jsonl", "heldout.jsonl")] == [2048, 256]
    assert not make_data(tasks.DEFAULT, folder)
    (folder / "heldout.jsonl").unlink()
    assert make_data(tasks.DEFAULT, folder)
    assert make_data(tasks.DEFAULT, folder, seed=1), "another seed gives other rows"
    assert make_data(tasks.DEFAULT, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == written


def test_without_reasoning_gym_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"reasoning-gym is missing.*pip install 'lockstep-rl\[reasoning-gym\]'"):
        make_data(tasks.DEFAULT, tmp_path)


def test_the_names_of_tasks_experiments_and_make_targets_are_the_same() -> None:
    others = {path.stem.removeprefix("real_") for path in (ROOT / "configs/experiment").glob("real_*.yaml")}
    assert {*others, tasks.DEFAULT} == set(TASKS)
    makefile = (ROOT / "Makefile").read_text()
    (listed,) = re.findall(r"^real: .*TASK=([\w|]+)", makefile, re.MULTILINE)
    assert set(listed.split("|")) == set(TASKS)
    for name in TASKS:
        config = composed(f"experiment={experiment(name)}")
        assert config.data.path == f"data/real/{name}/train.jsonl"
        assert config.data.heldout_path == f"data/real/{name}/heldout.jsonl"


def test_the_names_of_methods_change_a_real_run_by_one_override() -> None:
    assert composed("experiment=real", "method=lora").model.lora.rank > 0
    assert composed("experiment=real", "method=lora").optimizer.lr >= 5 * composed("experiment=real").optimizer.lr
    assert composed("experiment=real", "method=ppo").plan.has_critic
    assert composed("experiment=real", "method=ppo", "optimizer.lr=1e-6").optimizer.lr == 1e-6


def test_rows_are_json_lines_of_a_chat_and_an_answer(tmp_path: Path) -> None:
    make_data("calculator", tmp_path)
    for line in (tmp_path / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["messages"][-1]["role"] == "user"
        assert isinstance(row["answer"], str)


def test_rows_without_reasoning_gym_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r"reasoning-gym is missing.*pip install 'lockstep-rl\[real\]'"):
        make_data(tasks.DEFAULT, tmp_path / "rows")


@pytest.mark.parametrize("words", [[], ["--model-only"]], ids=["names", "names alone"])
def test_the_model_is_made_before_the_rows(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr("scripts.make_real_model.is_made", lambda directory: True)
    monkeypatch.setattr("scripts.make_real_model.make_model", lambda directory: made.append("model"))
    monkeypatch.setattr("scripts.make_real_model.make_data", lambda *arguments, seed: made.append("rows"))
    monkeypatch.setattr(sys, "argv", ["make_real_model.py", *words])
    assert main() == 0
    assert made == (["model"] if words else ["model", "rows"])
