"""Group-wise reward functions: called once per group, in the trainer's process and in workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.rewards.batches import Scope, is_group_wise
from lockstep.rewards.composition import FaultTolerance, RewardSet, make_reward_set
from lockstep.rewards.outcomes import ERRORS, Outcome, Verdict
from lockstep.rewards.shaping import Shaping
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Rollout, RolloutStatus
from tests.fixtures.pages import ROOT, page_files
from tests.unit.rewards.test_composition import rollout

FILE = '''
import os, time

def rank(rollouts, *, step=1.0):
    """Rank by the number of sampled tokens, and check that the group is one."""
    assert len({rollout.group_id for rollout in rollouts}) == 1
    assert [rollout.rollout_id for rollout in rollouts] == sorted(rollout.rollout_id for rollout in rollouts)
    lengths = [rollout.num_sampled for rollout in rollouts]
    return [step * sum(length < other for other in lengths) for length in lengths]

async def size(rollouts):
    return [len(rollouts)] * len(rollouts)

def picky(rollouts):
    """None for the first, an exception for the second, NaN for the third."""
    return [None, ValueError("no"), float("nan"), 1.0][: len(rollouts)]

def by_turn(rollouts):
    return [[0.5] * rollout.num_turns for rollout in rollouts]

class Called:
    def __call__(self, rollouts):
        return [2.0] * len(rollouts)

called = Called()

def vandal(rollouts):
    for rollout in rollouts:
        rollout.messages[-1]["content"] = "7"
        rollout.example.clear()
    while len(rollouts) > 1:
        rollouts.pop()
    return [1.0] * 3

def short(rollouts):
    return [1.0] * (len(rollouts) - 1)

def one(rollouts):
    return 1.0

def raises(rollouts):
    raise ZeroDivisionError("oh")

def dies(rollouts):
    os._exit(3)

def hangs(rollouts):
    if rollouts[0].group_id:
        return [1.0] * len(rollouts)
    time.sleep(60)

def last(rollout):
    return float(rollout.messages[-1]["content"])

def not_a_group(samples):
    return [1.0] * len(samples)
'''
TOKENS = {0: (3, 1, 2), 1: (5, 5)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture(params=["process", "thread"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def groups() -> list[Rollout]:
    """Groups of three and two rollouts, whose rollouts are not side by side."""
    made = [
        replace(rollout("8", tokens=tokens, number=10 * group + index), group_id=group)
        for group, lengths in TOKENS.items()
        for index, tokens in enumerate(lengths)
    ]
    return [made[3], made[0], made[4], made[2], made[1]]


def score(
    file: Path, mode: Any, *names: str, given: Sequence[Rollout] = (), settings: Any = None, **tolerance: Any
) -> tuple[list[Rollout], dict[str, float]]:
    rewards = make_reward_set(
        [f"{file}:{name}" for name in names],
        settings=settings,
        tolerance=FaultTolerance(max_error_rate=1.0, **tolerance),
        isolation=Isolation(mode=mode, workers=2),
        shaping=Shaping(turn_rewards=names == ("by_turn",)),
    )
    try:
        return asyncio.run(rewards.score(list(given) or groups())), rewards.take_metrics()
    finally:
        rewards.close()


def test_a_function_with_the_parameter_rollouts_sees_one_whole_group_in_a_call(file: Path, mode: str) -> None:
    found, metrics = score(file, mode, "rank", "size", "called", settings={"rank": {"step": 0.5}})
    # Tokens of group 0 are 3, 1, 2: the shortest is shorter than two others, the longest than none.
    ranks = {(one.rollout_id): one.rewards["rank"] for one in found}
    assert ranks == {0: 0.0, 1: 1.0, 2: 0.5, 10: 0.0, 11: 0.0}
    assert {one.rollout_id: one.rewards["size"] for one in found} == {0: 3, 1: 3, 2: 3, 10: 2, 11: 2}
    assert {one.rewards["called"] for one in found} == {2.0}
    assert [one.rollout_id for one in found] == [one.rollout_id for one in groups()]
    assert metrics["reward/rank/mean"] == pytest.approx(1.5 / 5)


def test_rollouts_that_failed_are_not_part_of_their_group(file: Path, mode: str) -> None:
    given = [replace(one, status=RolloutStatus.FAILED) if one.rollout_id in (0, 10) else one for one in groups()]
    found, _ = score(file, mode, "size", given=given)
    assert {one.rollout_id: one.rewards.get("size") for one in found} == {0: None, 1: 2, 2: 2, 10: None, 11: 1}


def test_none_and_failures_of_single_rollouts_leave_the_others_of_the_group(file: Path, mode: str) -> None:
    given = [rollout(number=number) for number in range(4)]
    found, metrics = score(file, mode, "picky", given=given)
    assert [one.status is RolloutStatus.FAILED for one in found] == [True, True, True, False]
    assert "no reward function applies" in str(found[0].error)
    assert "picky: exception: ValueError: no" in str(found[1].error)
    assert "picky: non_finite" in str(found[2].error)
    assert (metrics["reward/errors/exception"], metrics["reward/errors/non_finite"]) == (1, 1)


def test_a_group_wise_function_may_give_one_number_per_turn(file: Path, mode: str) -> None:
    found, _ = score(file, mode, "by_turn")
    assert {one.turn_rewards for one in found} == {(0.5,)}


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("short", Outcome.WRONG_LENGTH), ("one", Outcome.WRONG_TYPE), ("raises", Outcome.EXCEPTION)],
)
def test_a_failure_of_the_call_drops_the_group_and_is_counted(
    name: str, outcome: Outcome, file: Path, mode: str
) -> None:
    found, metrics = score(file, mode, name)
    assert all(one.status is RolloutStatus.FAILED and f"{name}: {outcome}" in str(one.error) for one in found)
    assert {error: metrics[f"reward/errors/{error}"] for error in ERRORS if metrics[f"reward/errors/{error}"]} == {
        outcome: 5
    }


def test_a_group_wise_function_that_changes_its_inputs_changes_no_others(file: Path, mode: str) -> None:
    found, metrics = score(file, mode, "vandal", "last", on_error={Outcome.WRONG_LENGTH: -1.0})
    assert {one.rewards["last"] for one in found} == {8.0}, "the other function saw the text that was sampled"
    assert {one.rollout_id: one.rewards["vandal"] for one in found} == {0: 1.0, 1: 1.0, 2: 1.0, 10: -1.0, 11: -1.0}
    assert all(one.example for one in found)
    assert metrics["reward/errors/wrong_length"] == 2


def test_a_group_that_hangs_is_killed_alone(file: Path) -> None:
    found, metrics = score(file, "process", "hangs", timeout_s=2.0)
    assert {one.group_id: one.status is RolloutStatus.FAILED for one in found} == {0: True, 1: False}
    assert metrics["reward/errors/timeout"] == 3


def test_a_worker_that_dies_is_counted_for_each_rollout_of_the_group(file: Path) -> None:
    _, metrics = score(file, "process", "dies")
    assert metrics["reward/errors/crashed"] == 5


def test_another_parameter_name_gets_a_rollout_and_says_so(file: Path, mode: str) -> None:
    found, _ = score(file, mode, "not_a_group")
    assert "mine.py: object of type 'Rollout' has no len()" in str(found[0].error)


def test_settings_of_a_group_wise_function_are_checked(file: Path, mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"it takes step: leave out reward\.settings\.rank\.stpe"):
        score(file, mode, "rank", settings={"rank": {"stpe": 1}})


def test_the_first_parameter_declares_a_group_wise_function() -> None:
    assert is_group_wise(lambda rollouts: [])
    assert not is_group_wise(lambda rollout: 0.0)
    assert not is_group_wise(lambda rollout, rollouts=None: 0.0)

    class Judge:
        def __init__(self, rollout: int) -> None: ...
        def __call__(self, rollouts: list[Rollout]) -> list[float]:
            return []

    assert is_group_wise(Judge)
    assert is_group_wise(Judge(1))


def test_async_groups_are_judged_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import asyncio\nrunning = 0\n\n"
        "async def most(rollouts):\n"
        "    global running\n    running += 1\n    await asyncio.sleep(0.05)\n    found = running\n    running -= 1\n"
        "    return [found] * len(rollouts)\n\n"
        "class Most:\n    __hash__ = None\n\n"
        "    async def __call__(self, rollouts):\n        return await most(rollouts)\n"
    )
    for name in ("most", "Most"):
        found, _ = score(path, "thread", name)
        assert {one.rewards[name] for one in found} == {1}


def test_normalized_rewards_per_function_use_the_numbers_of_the_group(file: Path) -> None:
    """GDPO standardizes each function within the group, here tokens 3, 1, 2 with ranks 0, 2, 1."""
    found, _ = score(file, "thread", "rank", "last", given=groups()[1:2] + groups()[3:])
    ranks = np.array([one.rewards["rank"] for one in sorted(found, key=lambda one: one.rollout_id)])
    assert ((ranks - ranks.mean()) / ranks.std(ddof=1)).tolist() == [-1.0, 1.0, 0.0]
    assert all(math.isfinite(one.reward) for one in found)


def test_the_scope_keeps_the_order_of_rollouts() -> None:
    async def call(seen: Sequence[Rollout]) -> list[Verdict]:
        return [Verdict(outcome=Outcome.VALUE, value=float(one.rollout_id)) for one in seen]

    given = groups()
    for scope in Scope:
        verdicts = asyncio.run(scope.judge(given, call))
        assert [verdict.value for verdict in verdicts] == [one.rollout_id for one in given], scope


def test_a_reward_set_without_rollouts_calls_nothing(file: Path) -> None:
    rewards: RewardSet = make_reward_set([f"{file}:raises"], isolation=Isolation(mode="thread"))
    assert asyncio.run(rewards.score([])) == []


def test_the_example_of_the_page_prefers_short_right_answers(tmp_path: Path) -> None:
    (name, source), *others = page_files(ROOT / "docs/group_rewards.md").items()
    assert not others
    (tmp_path / name).write_text(source)
    said = (("It is 7", 4), ("7", 2), ("8", 1))
    given = [rollout(answer, tokens=tokens, number=number) for number, (answer, tokens) in enumerate(said)]
    found, _ = score(tmp_path / name, "process", "brief", given=given)
    assert [one.reward for one in found] == [0.5, 1.0, 0.0], "the shortest right answer has 2 tokens"
    wrong, _ = score(tmp_path / name, "process", "brief", given=given[2:])
    assert [one.reward for one in wrong] == [0.0]
