"""Credit by turn, from a reward function to the gradient: what differs in one turn trains that turn only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.rewards.composition import Reward, RewardSet
from lockstep.rewards.shaping import Shaping
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.trainer.batch.batch_bytes import decode, encode
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import FromUpdate
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.objective.loss_normalization import StepCounts, loss_coefficients, normalized_loss
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.losses.inputs import LossInputs
from lockstep.trainer.objective.per_rollout import rollout_count
from tests.unit.trainer.config.test_presets import PRESETS

FIRST, LAST = 10, 20
"""First sampled token of the two turns; the second one says which rollout it is."""


def rollout(number: int, *, first: int = 0, **outcome: Any) -> Rollout:
    """Return a rollout of two turns of two tokens. first: makes its first turn differ from that of others."""

    def call(prompt: tuple[int, ...], *sampled: int) -> EngineCall:
        return EngineCall(
            prompt_ids=prompt, sampled_ids=sampled, sampled_logprobs=(-1.0, -1.0), finish_reason=FinishReason.STOP
        )

    one = call((1, 2), FIRST, 11 + first)
    two = call((*one.all_ids, 3), LAST, 30 + number)
    return Rollout(rollout_id=number, group_id=0, calls=(one, two), outcome=outcome)


def process_reward(rollout: Rollout) -> list[float]:
    """Score every first turn alike, and the last turn by its last token."""
    return [0.5, float(rollout.calls[-1].sampled_ids[-1] % 2)]


def early_reward(rollout: Rollout) -> list[float]:
    """Score the first turn by its last token, and every last turn alike."""
    return [float(rollout.calls[0].sampled_ids[-1] % 2), 0.5]


def stepped(
    rollouts: list[Rollout],
    algorithm: AlgorithmConfig,
    function: Callable[[Rollout], list[float]] = process_reward,
) -> StepBatch:
    shaping = Shaping(turn_rewards=algorithm.turn_rewards, turn_states=True)
    rewards = RewardSet([Reward(name="process", function=function)], shaping=shaping)
    scored = asyncio.run(rewards.score(rollouts))
    return decode(
        encode(StepBatch.of(scored, mask_truncated=False, with_turn_rewards=algorithm.turn_rewards, with_states=True))
    )


def advantages_and_gradient(batch: StepBatch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return (N,) advantages and the gradient of the loss with respect to the (N,) logprobs."""
    config = Config(algorithm=algorithm)
    correction = StepCorrection.of(batch, FromUpdate(), CorrectionConfig(mode="none"))
    targets, _ = rollout_targets(batch, Logprobs(old=FromUpdate()), correction, config.algorithm)
    logp_N = torch.full((len(batch.rollout_N),), -1.0, requires_grad=True)
    loss = POLICY_LOSSES[algorithm.loss].configured(algorithm)
    outputs = loss(
        LossInputs(
            logp_T=logp_N,
            old_logp_T=logp_N.detach(),
            advantages_T=targets.advantages_N,
            rollout_T=batch.rollout_N,
            num_rollouts=batch.num_rollouts,
        )
    )
    counts = StepCounts(num_rollouts=batch.num_rollouts, num_tokens=len(logp_N), max_completion_length=8)
    tokens_S = rollout_count(batch.rollout_N, batch.num_rollouts)
    coefficient_T = loss_coefficients(algorithm.normalizer, batch.rollout_N, tokens_S, counts, dtype=logp_N.dtype)
    normalized_loss(outputs.loss_T, coefficient_T).backward()
    assert logp_N.grad is not None
    return targets.advantages_N, logp_N.grad


def test_a_process_reward_that_differs_in_the_last_turn_trains_the_last_turn_only() -> None:
    """Rewards by turn: (.5, 0), (.5, 1), (.5, 0), (.5, 1). Without looking ahead, the first turns are equal. The last
    ones are ∓.5 from their mean; the gradient of 16 tokens is −A/16 each."""
    algorithm = AlgorithmConfig(
        advantage="dr_grpo", loss="reinforce", normalizer="token", turn_rewards=True, turn_discount=0.0
    )
    batch = stepped([rollout(number) for number in range(4)], algorithm)
    advantages_N, gradient_N = advantages_and_gradient(batch, algorithm)
    by_turn = [[0.0, 0.0, -0.5, -0.5], [0.0, 0.0, 0.5, 0.5]] * 2
    assert advantages_N.view(4, 4).tolist() == by_turn
    assert gradient_N.view(4, 4).tolist() == [[-a / 16 for a in row] for row in by_turn]


def test_a_process_reward_that_differs_in_the_first_turn_trains_the_first_turn_only() -> None:
    """First sampled tokens end in 11, 12, 13, 14: rewards 1, 0, 1, 0."""
    algorithm = AlgorithmConfig(
        advantage="dr_grpo", loss="reinforce", normalizer="token", turn_rewards=True, turn_discount=0.0
    )
    batch = stepped([rollout(number, first=number) for number in range(4)], algorithm, early_reward)
    _, gradient_N = advantages_and_gradient(batch, algorithm)
    by_turn = [[0.5, 0.5, 0.0, 0.0], [-0.5, -0.5, 0.0, 0.0]] * 2
    assert gradient_N.view(4, 4).tolist() == [[-a / 16 for a in row] for row in by_turn]


def test_the_same_rewards_as_one_number_train_both_turns() -> None:
    """So the gradient above is that of the credit by turn, not of the task."""
    algorithm = AlgorithmConfig(advantage="dr_grpo", loss="reinforce", normalizer="token")
    rewards = RewardSet([Reward(name="sum", function=lambda r: sum(process_reward(r)))])
    scored = asyncio.run(rewards.score([rollout(number) for number in range(4)]))
    advantages_N, _ = advantages_and_gradient(StepBatch.of(scored, mask_truncated=False), algorithm)
    assert advantages_N.view(4, 4)[:, 0].tolist() == [-0.5, 0.5, -0.5, 0.5]


def gigpo(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**PRESETS["gigpo"] | {"advantage_std": False, "loss": "reinforce"} | settings)


def test_gigpo_compares_turns_that_began_with_the_same_conversation() -> None:
    """Rollouts 0, 1 and 3 have equal first turns, so their last turns began in one state; rollout 2 has another.

    γ = .5. Returns of first turns, all in one state: .5, 1, .5, 1; of last turns: 0, 1 and 1 in one state, 0 alone.
    Episodes: .5, 1.5, .5, 1.5 less 1.
    """
    batch = stepped([rollout(number, first=int(number == 2)) for number in range(4)], gigpo())
    assert batch.states_K.tolist() == [0, 1, 0, 1, 0, 2, 0, 1]
    advantages_N, gradient_N = advantages_and_gradient(batch, gigpo(turn_discount=0.5, step_weight=3.0))
    episode, first = [-0.5, 0.5, -0.5, 0.5], [-0.25, 0.25, -0.25, 0.25]
    last = [-2 / 3, 1 / 3, 0.0, 1 / 3]
    expected = [[e + 3 * f] * 2 + [e + 3 * x] * 2 for e, f, x in zip(episode, first, last, strict=True)]
    torch.testing.assert_close(advantages_N.view(4, 4), torch.tensor(expected))
    torch.testing.assert_close(gradient_N.view(4, 4), -torch.tensor(expected) / 16)


def test_gigpo_uses_the_states_that_the_environment_reports() -> None:
    rollouts = [rollout(number, first=number, turn_states=["door", f"room {number % 2}"]) for number in range(4)]
    assert stepped(rollouts, gigpo()).states_K.tolist() == [0, 1, 0, 2, 0, 1, 0, 2]


@pytest.mark.parametrize(
    ("states", "says"),
    [
        (["door"], r"turn_states has 1 texts; expected 2, one per turn"),
        ("door", "is 'door'; expected a list of texts"),
        ([1, 2], "expected a list of texts"),
    ],
)
def test_malformed_states_fail_the_rollout(states: Any, says: str) -> None:
    shaped = Shaping(turn_states=True).apply(rollout(0, turn_states=states))
    assert shaped.status is RolloutStatus.FAILED
    assert says in str(shaped.error)


def test_states_of_other_groups_are_other_states() -> None:
    algorithm = gigpo()
    one = rollout(0)
    other = Rollout(rollout_id=1, group_id=1, calls=one.calls)
    assert stepped([one, other], algorithm).states_K.tolist() == [0, 1, 2, 3]
