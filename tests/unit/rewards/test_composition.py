"""Weighted sum of reward functions: no failure of a function becomes a score."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from lockstep.rewards.composition import FaultTolerance, Reward, RewardSet, Tally, make_reward_set
from lockstep.rewards.functions.built_in import (
    exact_match,
)
from lockstep.rewards.outcomes import Outcome
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.errors import ConfigError, RewardError
from lockstep.rollout.records import Cause, DataRow, EngineCall, FinishReason, Rollout, RolloutStatus

LENIENT = FaultTolerance(max_error_rate=1.0)


def rollout(answer: str = "", *, reference: str | None = "7", tokens: int = 1, number: int = 0, **turn: str) -> Rollout:
    call = EngineCall(
        prompt_ids=(1,),
        sampled_ids=(2,) * tokens,
        sampled_logprobs=(-0.5,) * tokens,
        finish_reason=FinishReason.STOP,
    )
    return Rollout(
        rollout_id=number,
        group_id=0,
        calls=(call,),
        messages=({"role": "user", "content": "q"}, {"role": "assistant", "content": answer, **turn}),
        example={"question": "q"} if reference is None else {"question": "q", "answer": reference},
    )


def score(rewards: RewardSet, rollouts: list[Rollout]) -> list[Rollout]:
    return asyncio.run(rewards.score(rollouts))


def test_rewards_are_kept_by_name_and_weighted_into_one():
    rewards = RewardSet(
        [Reward(name="exact", function=exact_match, weight=2.0), Reward(name="length", function=lambda r: -0.25)]
    )
    given = [rollout("7", number=0), rollout("8", number=1)]
    first, second = score(rewards, given)
    assert first.rewards == {"exact": 1.0, "length": -0.25}
    assert (first.reward, second.reward) == (1.75, -0.25)
    assert (first.rollout_id, second.rollout_id) == (0, 1)
    assert given[0].rewards == {}
    metrics = rewards.take_metrics()
    assert metrics["reward/exact/mean"] == 0.5
    assert metrics["reward/errors/exception"] == 0
    assert "reward/exact/mean" not in rewards.take_metrics()


def raises(r):
    raise ZeroDivisionError("oh")


def exits(r):
    raise SystemExit(1)


async def raises_async(r):
    raise ZeroDivisionError("oh")


def sleeps(r):
    time.sleep(3)
    return 1.0


async def sleeps_async(r):
    await asyncio.sleep(3)
    return 1.0


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def raises_unprintable(r):
    raise Unprintable


HOSTILE = [
    (raises, Outcome.EXCEPTION),
    (exits, Outcome.EXCEPTION),
    (raises_async, Outcome.EXCEPTION),
    (raises_unprintable, Outcome.EXCEPTION),
    (sleeps, Outcome.TIMEOUT),
    (sleeps_async, Outcome.TIMEOUT),
    (lambda r: "1.0", Outcome.WRONG_TYPE),
    (lambda r: [1.0], Outcome.WRONG_TYPE),
    (lambda r: 1j, Outcome.WRONG_TYPE),
    (lambda r: math.nan, Outcome.NON_FINITE),
    (lambda r: -math.inf, Outcome.NON_FINITE),
    (lambda r: np.float32("nan"), Outcome.NON_FINITE),
    (lambda r: 10**400, Outcome.NON_FINITE),
]


@pytest.mark.parametrize(("function", "outcome"), HOSTILE)
def test_a_hostile_function_drops_the_rollout_and_is_counted(function, outcome):
    tolerance = FaultTolerance(timeout_s=0.8, max_error_rate=1.0)
    rewards = RewardSet([Reward(name="exact", function=exact_match), Reward(name="bad", function=function)], tolerance)
    started = time.monotonic()
    scored = score(rewards, [rollout("7"), rollout("8")])
    assert time.monotonic() - started < 8
    for one in scored:
        assert one.status is RolloutStatus.FAILED
        assert one.dropped_by is Cause.REWARD
        assert f"reward bad: {outcome}" in (one.error or "")
        assert one.rewards == {}
    metrics = rewards.take_metrics()
    assert metrics[f"reward/errors/{outcome}"] == 2
    assert sum(value for name, value in metrics.items() if name.startswith("reward/errors/")) == 2


@pytest.mark.parametrize("value", [1, True, np.float32(1), np.int64(1), np.bool_(True)])
def test_every_real_number_is_a_reward(value):
    (scored,) = score(RewardSet([Reward(name="one", function=lambda r: value)]), [rollout()])
    assert scored.reward == 1.0
    assert type(scored.rewards["one"]) is float


def test_only_the_rollouts_that_failed_are_dropped():
    def picky(r):
        return 1.0 if r.rollout_id != 1 else math.nan

    scored = score(RewardSet([Reward(name="picky", function=picky)], LENIENT), [rollout(number=n) for n in range(3)])
    assert [one.status is RolloutStatus.FAILED for one in scored] == [False, True, False]


def test_the_action_on_an_error_is_set_by_outcome():
    tolerance = FaultTolerance(on_error={Outcome.NON_FINITE: -1.0}, max_error_rate=1.0)
    rewards = RewardSet([Reward(name="nan", function=lambda r: math.nan)], tolerance)
    (scored,) = score(rewards, [rollout()])
    assert scored.reward == -1.0
    assert scored.is_trainable
    assert rewards.take_metrics()["reward/errors/non_finite"] == 1
    strict = FaultTolerance(on_error={Outcome.EXCEPTION: "raise"})
    with pytest.raises(RewardError, match=r"reward raises: exception: ZeroDivisionError in line \d+ of .*: oh"):
        score(RewardSet([Reward(name="raises", function=raises)], strict), [rollout()])
    with pytest.raises(ConfigError, match="expected drop, raise or a number"):
        FaultTolerance(on_error={Outcome.TIMEOUT: math.nan})
    with pytest.raises(ConfigError, match="expected one of"):
        FaultTolerance(on_error={Outcome.VALUE: "drop"})


def half(r):
    return 1.0 if r.rollout_id % 2 else math.nan


def test_too_many_errors_in_a_step_end_the_run_however_small_it_is():
    rewards = RewardSet([Reward(name="half", function=half)], FaultTolerance(max_error_rate=0.5))
    score(rewards, [rollout(number=n) for n in range(4)])
    rewards.refuse_errors()
    rewards.take_metrics()
    score(rewards, [rollout(number=n) for n in (0, 2, 3)])
    with pytest.raises(RewardError, match=r"2 of 3 reward calls failed, expected at most 50% of a step .* nan"):
        rewards.refuse_errors()


def test_errors_of_an_evaluation_do_not_count_for_the_step():
    rewards = RewardSet([Reward(name="half", function=half)], FaultTolerance(max_error_rate=0.5))
    score(rewards, [rollout(number=1)])
    tally = Tally()
    asyncio.run(rewards.score([rollout(number=n) for n in (0, 2)], tally=tally))
    with pytest.raises(RewardError, match="2 of 2 reward calls failed"):
        rewards.refuse_errors(tally)
    rewards.refuse_errors()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_error_names_file_line_and_row(tmp_path, isolation):
    (tmp_path / "mine.py").write_text(
        "def inner(row):\n    return row['missing']\n\n\ndef raises(rollout):\n    return inner(rollout.example)\n\n\n"
        "def returns_text(rollout):\n    return 'good'\n"
    )
    row = DataRow(answer="7")
    row.place = "row 12 of rows.jsonl"
    for name, what in (
        ("raises", "exception: KeyError in line 2 of {}: 'missing'"),
        ("returns_text", "wrong_type: returned str 'good'; expected a float (line 9 of {})"),
    ):
        spec = f"{tmp_path}/mine.py:{name}"
        rewards = make_reward_set([spec], isolation=Isolation(mode=isolation), tolerance=LENIENT)
        (scored,) = score(rewards, [replace(rollout(), example=row)])
        rewards.close()
        assert scored.error == f"reward {name}: {what.format(tmp_path / 'mine.py')} (row 12 of rows.jsonl)"


async def test_all_coroutines_of_user_functions_run_in_one_loop_which_is_not_that_of_the_run():
    loops = []

    async def is_async(r):
        loops.append(asyncio.get_running_loop())
        return 1.0

    def returns_one(r):
        return is_async(r)

    rewards = RewardSet([Reward(name="a", function=is_async), Reward(name="b", function=returns_one)])
    (scored,) = await rewards.score([rollout()])
    assert scored.rewards == {"a": 1.0, "b": 1.0}
    assert loops[0] is loops[1]
    assert loops[0] is not asyncio.get_running_loop(), "a blocking function would stop the run"


def test_a_function_cannot_change_the_input_of_others():
    def vandal(r):
        r.messages[-1]["content"] = "7"
        r.example["answer"] = "8"
        return 0.0

    rewards = RewardSet([Reward(name="vandal", function=vandal), Reward(name="exact", function=exact_match)])
    given = rollout("8")
    (scored,) = score(rewards, [given])
    assert scored.rewards["exact"] == 0.0
    assert given.messages[-1]["content"] == "8"


def test_rollouts_that_failed_before_stay_unchanged():
    failed = Rollout(rollout_id=0, group_id=0, calls=(), status=RolloutStatus.FAILED, error="engine")
    rewards = RewardSet([Reward(name="exact", function=exact_match)])
    scored = score(rewards, [failed, rollout("7")])
    assert scored[0] is failed
    assert scored[1].reward == 1.0
    assert score(rewards, []) == []


def test_calls_run_at_the_same_time():
    others = threading.Barrier(16)

    def meet(r):
        others.wait(30)
        return 1.0

    scored = score(RewardSet([Reward(name="meet", function=meet)]), [rollout() for _ in range(16)])
    assert [one.reward for one in scored] == [1.0] * 16


def test_a_reward_set_from_settings(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def short(rollout, limit=5):\n    return float(rollout.num_sampled <= limit)\n\n"
        "def trl_style(completions, **_):\n    return [0.5] * len(completions)\n"
    )
    rewards = make_reward_set(
        ["exact_match", f"{file}:short", f"{file}:trl_style", "regex"],
        [1.0, 0.5, 2.0, 0.0],
        {"short": {"limit": 1}, "regex": {"pattern": "7"}},
    )
    first, second = score(rewards, [rollout("7"), rollout("7", tokens=2)])
    assert first.rewards == {"exact_match": 1.0, "short": 1.0, "trl_style": 0.5, "regex": 1.0}
    assert (first.reward, second.reward) == (2.5, 2.0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((["exact"],), "unknown reward function 'exact'; expected one of demo_answer"),
        (([],), "reward.functions"),
        ((["exact_match"], [1.0, 2.0]), "2 values for 1"),
        ((["exact_match"], [math.nan]), "finite"),
        ((["exact_match", "exact_match"],), "two reward functions"),
        ((["regex"],), "missing a required argument: 'pattern'.*reward.settings.regex"),
        ((["exact_match"], None, {"exact_match": {"colum": "a"}}), "colum"),
        ((["exact_match"], None, {"numeric": {}}), "not among reward.functions"),
    ],
)
def test_invalid_settings_are_config_errors(arguments, says):
    with pytest.raises(ConfigError, match=says):
        make_reward_set(*arguments)
