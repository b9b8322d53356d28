"""Credit per turn: from rewards reported by environments to advantages of tokens."""

from __future__ import annotations

import pytest

from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.credit.targets import turn_advantages


def rollout(rollout_id: int, group_id: int, reward: float, given: list[float], *, turns: int = 2) -> Rollout:
    """Return a rollout with turns of 2 tokens, each extending the last. given: turn rewards of the environment."""
    calls, context = [], (1, 2)
    for turn in range(turns):
        call = EngineCall(
            prompt_ids=context,
            sampled_ids=(10 + turn, 20 + turn),
            sampled_logprobs=(-1.0, -1.0),
            finish_reason=FinishReason.STOP,
        )
        calls.append(call)
        context = (*call.all_ids, 3)
    return Rollout(
        rollout_id=rollout_id, group_id=group_id, calls=tuple(calls), reward=reward, outcome={"turn_rewards": given}
    )


def batch_of(*rollouts: Rollout) -> StepBatch:
    return StepBatch.of(rollouts, mask_truncated=False, with_turn_rewards=True)


PAIR = (rollout(0, 0, reward=2.0, given=[1.0]), rollout(1, 0, reward=1.0, given=[0.0, 1.0]))


def test_the_last_turn_gets_the_reward_of_the_reward_functions() -> None:
    assert batch_of(*PAIR).turn_rewards_K.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_without_turn_rewards_the_last_turn_gets_the_whole_reward() -> None:
    batch = StepBatch.of(PAIR, mask_truncated=False)
    assert batch.turn_rewards_K.tolist() == [0.0, 2.0, 0.0, 1.0]


def test_a_turn_is_compared_with_the_same_turn_of_the_group() -> None:
    """Returns: rollout 0 has (2, 1), rollout 1 has (1, 1). Turn 0 differs by 1, turn 1 by 0."""
    advantages_N, metrics = turn_advantages(batch_of(*PAIR), AlgorithmConfig(advantage="dr_grpo"))
    assert advantages_N.tolist() == pytest.approx([0.5, 0.5, 0, 0, -0.5, -0.5, 0, 0])
    assert metrics["reward/zero_std_fraction"] == 0.0, "turn 0 of the prompt has advantages"


def test_a_prompt_without_any_advantage_is_counted() -> None:
    silent = (rollout(2, 1, reward=1.0, given=[1.0]), rollout(3, 1, reward=1.0, given=[1.0], turns=3))
    _, metrics = turn_advantages(batch_of(*PAIR, *silent), AlgorithmConfig(advantage="dr_grpo"))
    assert metrics["reward/zero_std_fraction"] == 0.5


def test_later_rewards_are_discounted() -> None:
    """Returns at turn 0 with a discount of 0.5: 1 + 0.5 and 0 + 0.5."""
    settings = AlgorithmConfig(advantage="dr_grpo", turn_discount=0.5)
    late = (rollout(0, 0, reward=2.0, given=[0.0]), rollout(1, 0, reward=0.0, given=[]))
    advantages_N, _ = turn_advantages(batch_of(*late), settings)
    assert advantages_N.tolist() == pytest.approx([0.5, 0.5, 1, 1, -0.5, -0.5, -1, -1])


def test_a_turn_reached_by_one_rollout_has_no_advantage() -> None:
    longer = (rollout(0, 0, reward=3.0, given=[0.0, 0.0], turns=3), rollout(1, 0, reward=1.0, given=[]))
    advantages_N, _ = turn_advantages(batch_of(*longer), AlgorithmConfig(advantage="dr_grpo"))
    assert advantages_N[4:6].tolist() == [0.0, 0.0]
    assert advantages_N[:2].tolist() == pytest.approx([1, 1])


def test_a_step_without_rollouts_has_no_turns() -> None:
    advantages_N, _ = turn_advantages(batch_of(), AlgorithmConfig())
    assert len(advantages_N) == 0
