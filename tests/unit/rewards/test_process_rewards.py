"""Process rewards: reward functions that return one number per turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.rewards.batches import BatchReward
from lockstep.rewards.composition import FaultTolerance, Reward, RewardSet, make_reward_set
from lockstep.rewards.outcomes import Outcome, judge
from lockstep.rewards.shaping import Shaping, turn_rewards
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.rollout.saved_rollouts import from_json, to_json

LENIENT = FaultTolerance(max_error_rate=1.0)
BY_TURN = Shaping(turn_rewards=True)


def rollout(turns: int = 3, **outcome: Any) -> Rollout:
    call = EngineCall(prompt_ids=(1,), sampled_ids=(5,), sampled_logprobs=(-1.0,), finish_reason=FinishReason.STOP)
    return Rollout(rollout_id=0, group_id=0, calls=(call,) * turns, outcome=outcome)


def scored(
    *functions: Callable[[Rollout], Any], given: Rollout | None = None, shaping: Shaping = BY_TURN, weight: float = 2.0
) -> Rollout:
    rewards = [Reward(name=f"f{number}", function=function, weight=weight) for number, function in enumerate(functions)]
    return asyncio.run(RewardSet(rewards, LENIENT, shaping).score([given or rollout()]))[0]


def test_one_number_per_turn_is_kept_by_turn_and_summed_into_the_reward() -> None:
    found = scored(lambda r: [0.5, 0.0, 0.25], lambda r: 1.0, lambda r: np.array([0.0, 1.0, 0.0]))
    assert found.rewards == {"f0": 0.75, "f1": 1.0, "f2": 1.0, "turns": 0.0}
    assert found.turn_rewards == (1.0, 2.0, 0.5)
    assert found.reward == 2 * 2.75
    assert turn_rewards(found, reported=True).tolist() == [1.0, 2.0, 0.5 + 2.0], "the last turn gets the other rewards"


def test_turn_rewards_of_environment_and_functions_add_up() -> None:
    found = scored(lambda r: [0.5, 0.0, 0.25], given=rollout(turn_rewards=[4.0, 2.0]))
    assert found.reward == 1.5 + 6.0
    assert turn_rewards(found, reported=True).tolist() == [5.0, 2.0, 0.5]


def test_scoring_again_replaces_the_turn_rewards() -> None:
    assert scored(lambda r: 1.0, given=scored(lambda r: [1.0, 1.0, 1.0])).turn_rewards == ()


@pytest.mark.parametrize(
    ("value", "outcome", "says"),
    [
        ([1.0, 2.0], Outcome.WRONG_LENGTH, "returned 2 rewards for the 3 turns of a rollout"),
        ([], Outcome.WRONG_LENGTH, "returned 0 rewards for the 3 turns"),
        ([1.0, math.nan, 0.0], Outcome.NON_FINITE, "for turn 1: returned nan"),
        ([1.0, 0.0, "good"], Outcome.WRONG_TYPE, "for turn 2: returned str 'good'"),
        ([1.0, None, 0.0], Outcome.WRONG_TYPE, "for turn 1: returned NoneType None"),
        ([[1.0], [2.0, 3.0], 4.0], Outcome.WRONG_TYPE, "for turn 0: returned a list"),
        ([1e308, 1e308, 0.0], Outcome.NON_FINITE, "returned inf"),
    ],
    ids=str,
)
def test_malformed_turn_rewards_are_typed_and_drop_the_rollout(value: Any, outcome: Outcome, says: str) -> None:
    verdict = judge(value, 3)
    assert (verdict.outcome, verdict.turns) == (outcome, ())
    assert says in verdict.detail
    found = scored(lambda r: value)
    assert (found.status, found.reward, found.turn_rewards) == (RolloutStatus.FAILED, 0.0, ())


def test_without_credit_per_turn_a_list_is_refused_with_the_setting_that_takes_it() -> None:
    found = scored(lambda r: [1.0, 2.0, 3.0], shaping=Shaping())
    assert found.status is RolloutStatus.FAILED
    assert "expected a float; one number per turn needs algorithm.turn_rewards=true" in str(found.error)


def test_a_batch_function_may_return_a_list_for_each_rollout() -> None:
    def function(rollouts: Sequence[Rollout]) -> list[Any]:
        return [[1.0, 2.0, 3.0], None, 0.5, [1.0]]

    batch = BatchReward(function=function, arguments=lambda rollouts: {"rollouts": rollouts})
    rewards = RewardSet([Reward(name="f", function=batch)], LENIENT, BY_TURN)
    found = asyncio.run(rewards.score([rollout() for _ in range(4)]))
    assert [one.turn_rewards for one in found] == [(1.0, 2.0, 3.0), (), (), ()]
    assert [one.reward for one in found] == [6.0, 0.0, 0.5, 0.0]
    assert [one.is_trainable for one in found] == [True, False, True, False]


def test_functions_of_files_return_turn_rewards_through_their_worker(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text("def steps(rollout):\n    return [0.1 * turn for turn in range(rollout.num_turns)]\n")
    rewards = make_reward_set([f"{file}:steps"], tolerance=LENIENT, shaping=BY_TURN)
    try:
        (found,) = asyncio.run(rewards.score([rollout()]))
    finally:
        rewards.close()
    assert found.turn_rewards == (0.0, 0.1, 0.2)
    assert found.reward == sum(found.turn_rewards)


def test_saved_rollouts_keep_turn_rewards() -> None:
    given = scored(lambda r: [1.0, 0.0, 0.5])
    assert from_json(to_json(given)).turn_rewards == (2.0, 0.0, 1.0)
    assert "turn_rewards" not in to_json(rollout())
    with pytest.raises(ValueError, match="1 turn_rewards for 3 calls"):
        from_json({**to_json(given), "turn_rewards": [1.0]})
    with pytest.raises(ValueError, match="not a finite number"):
        from_json({**to_json(given), "turn_rewards": [1.0, math.nan, 0.0]})
