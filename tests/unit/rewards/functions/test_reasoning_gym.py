"""The reward of tasks of reasoning-gym: the score of the task's own scorer, which never runs code of the model."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.rewards.composition import FaultTolerance, make_reward_set
from lockstep.rewards.functions.reasoning_gym import (
    EVALUATES,
    UNREADABLE_ANSWER,
    is_harmless,
    make_task,
    read_entry,
    reasoning_gym,
    write_entry,
)
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout

pytest.importorskip("reasoning_gym", reason="pip install 'lockstep-rl[reasoning-gym]'")

SLOW = ("knight_swap", "futoshiki", "sokoban", "zebra_puzzles", "puzzle24")
"""Tasks that take up to seconds for an entry."""


def names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS.keys() - {"composite"})


def rollout_of(task: str, entry: dict[str, Any], answer: str, **parameters: Any) -> Rollout:
    example = {"question": entry["question"], "reasoning_gym": write_entry(entry, task, parameters)}
    turns = ({"role": "user", "content": entry["question"]}, {"role": "assistant", "content": answer})
    return Rollout(rollout_id=0, group_id=0, calls=(), example=example, messages=turns, reward=0.0)


def answers(entry: dict[str, Any], other: dict[str, Any]) -> list[str]:
    metadata = entry["metadata"]
    right = entry["answer"] or metadata.get("example_correct_answer") or metadata.get("possible_answer")
    return [str(right), str(other["answer"]), "I do not know", "", "7"]


def test_every_task_is_scored_as_its_own_scorer_scores_it() -> None:
    seen = 0
    for task in names():
        if task in SLOW:
            continue
        data = make_task(task, {}, seed=3, size=3)
        entry, other = data[0], data[1]
        for answer in answers(entry, other):
            said = answer.strip()
            if task in EVALUATES and not is_harmless(said):
                said = UNREADABLE_ANSWER
            try:
                expected = data.score_answer(said, entry)
            except Exception:
                expected = 0.0
            assert reasoning_gym(rollout_of(task, entry, answer)) == expected, (task, answer)
            seen += 1
    assert seen > 90 * 5


def test_an_entry_is_read_as_it_was_written() -> None:
    for task in names():
        if task in SLOW:
            continue
        entry = make_task(task, {}, seed=5, size=2)[0]
        back = read_entry(json.loads(write_entry(entry, task, {})))
        assert json.loads(json.dumps(back)) == json.loads(json.dumps(entry)), task
        assert back["answer"] == entry["answer"]


def test_the_right_answers_of_tasks_that_evaluate_them_reach_the_scorer() -> None:
    for task in sorted(EVALUATES - set(SLOW)):
        data = make_task(task, {}, seed=0, size=12)
        for index in range(12):
            assert is_harmless(str(data[index]["answer"])), (task, data[index]["answer"])
            assert reasoning_gym(rollout_of(task, data[index], str(data[index]["answer"]))) == 1.0


def test_all_tasks_whose_scorer_evaluates_text_are_known() -> None:
    from reasoning_gym.factory import DATASETS

    found = set()
    for task in names():
        source = inspect.getsource(DATASETS[task][0].score_answer)
        if re.search(r"\b(eval|exec|parse_expr|sympify|S)\(", source) and task != "number_sorting":
            found.add(task)
    # number_sorting evaluates its own entry only; propositional_logic has a parser of its own of that name.
    assert found - {"propositional_logic"} == EVALUATES


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch {path}')",
        "open('{path}', 'w').write('x')",
        "[open('{path}', 'w')]",
        "[1 for x in [print('a', file=open('{path}', 'w'))]]",
        "exec(\"open('{path}', 'w')\")",
        "sin(open('{path}', 'w'))",
        "exp('open(chr(47))')",
        "(lambda: open('{path}', 'w'))()",
        "[[x] for int.__class_getitem__ in [exec]]",
        "f'{{open}}'",
    ],
)
@pytest.mark.parametrize("task", sorted(EVALUATES - set(SLOW)))
def test_an_answer_that_would_run_code_is_scored_as_unreadable(task: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "ran"
    attack = text.format(path=path)
    assert not is_harmless(attack)
    data = make_task(task, {}, seed=0, size=1)
    expected = reasoning_gym(rollout_of(task, data[0], UNREADABLE_ANSWER))
    assert reasoning_gym(rollout_of(task, data[0], attack)) == expected < 1
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "12.5",
        "(3 + 4) * 2 - 1",
        "x**2/2 + sin(3*x) + C",
        "[[0, 1], [1, 0]]",
        "['A', 'B']",
        "A B C.",
        "1 2\n3 4",
    ],
)
def test_an_answer_of_mathematics_or_plain_text_is_harmless(text: str) -> None:
    assert is_harmless(text)


def test_the_last_tagged_text_is_the_answer() -> None:
    entry = make_task("leg_counting", {}, seed=0, size=1)[0]
    right = entry["answer"]
    assert reasoning_gym(rollout_of("leg_counting", entry, f"<answer>0</answer> no, <answer> {right} </answer>.")) == 1
    assert reasoning_gym(rollout_of("leg_counting", entry, f"<answer>{right}</answer> <answer>0</answer>")) < 1
    tagged = rollout_of("leg_counting", entry, f"<out>{right}</out>")
    assert reasoning_gym(tagged) < 1
    assert reasoning_gym(tagged, tag="out") == 1


async def test_it_runs_in_a_process_that_can_be_killed() -> None:
    entry = make_task("countdown", {}, seed=0, size=1)[0]
    scored = []
    for answer, tolerance in ((entry["answer"], FaultTolerance()), ("9**9**9**9", FaultTolerance(timeout_s=1.0))):
        rewards = make_reward_set(["reasoning_gym"], tolerance=tolerance)
        try:
            scored += await rewards.score([rollout_of("countdown", entry, answer)])
        finally:
            rewards.close()
    assert scored[0].reward == 1.0
    assert scored[1].error is not None or scored[1].reward < 1


def test_a_row_of_other_data_is_refused() -> None:
    turns = ({"role": "assistant", "content": "7"},)
    rollout = Rollout(rollout_id=0, group_id=0, calls=(), example={"answer": "7"}, messages=turns, reward=0.0)
    with pytest.raises(DataError, match="needs column 'reasoning_gym' of the data row, found answer"):
        reasoning_gym(rollout)


@pytest.mark.parametrize(
    ("task", "parameters", "problem"),
    [
        ("leg_countin", {}, r"no such task \(did you mean leg_counting\?\)"),
        ("composite", {}, "no such task"),
        ("products", {"min_term": 2}, r"no parameter min_term \(did you mean min_terms\?\)"),
        ("products", {"min_terms": "two"}, "min_terms='two' must be <class 'int'>"),
        ("products", {"min_terms": True}, "min_terms=True must be"),
        ("products", {"min_terms": -1}, r"refuses data.parameters=\{'min_terms': -1\}: min_terms must be positive"),
    ],
)
def test_a_wrong_task_or_parameter_is_refused(task: str, parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_task(task, parameters)
