"""Reward functions with TRL's signature."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lockstep.rewards.composition import Reward, RewardSet
from lockstep.rewards.outcomes import Outcome
from lockstep.rewards.trl import from_trl
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import RolloutStatus
from tests.unit.rewards.test_composition import LENIENT, rollout, score


def test_a_trl_function_gets_prompts_completions_and_columns():
    seen = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, columns=columns)
        return [1.0 if c[-1]["content"] == a else None for c, a in zip(completions, answer, strict=True)]

    rewards = RewardSet(
        [
            Reward(name="trl", function=from_trl(reward, conversational=True)),
            Reward(name="zero", function=lambda r: 0.0),
        ]
    )
    first, second = score(rewards, [rollout("7", tokens=3), rollout("8")])
    assert seen["prompts"][0] == [{"role": "user", "content": "q"}]
    assert seen["completions"][0] == [{"role": "assistant", "content": "7"}]
    assert {name: seen["columns"].pop(name) for name in ("question", "completion_ids")} == {
        "question": ["q", "q"],
        "completion_ids": [[2, 2, 2], [2]],
    }
    assert sorted(seen["columns"]) == ["log_extra", "log_metric", "trainer_state"], "what TRL 1.16 passes beside them"
    assert first.rewards == {"trl": 1.0, "zero": 0.0}
    assert second.rewards == {"zero": 0.0}
    assert second.status is RolloutStatus.COMPLETED


def test_a_rollout_that_no_function_applies_to_is_dropped_not_zero():
    rewards = RewardSet([Reward(name="trl", function=from_trl(lambda completions: [None] * len(completions)))])
    (scored,) = score(rewards, [rollout()])
    assert scored.status is RolloutStatus.FAILED
    assert "no reward function applies" in (scored.error or "")


@pytest.mark.parametrize(
    ("value", "outcome"),
    [([1.0], Outcome.WRONG_LENGTH), ([1.0] * 3, Outcome.WRONG_LENGTH), (1.0, Outcome.WRONG_TYPE),
     (None, Outcome.WRONG_TYPE), ([1.0, "x"], Outcome.WRONG_TYPE), ([1.0, math.nan], Outcome.NON_FINITE)],
)  # fmt: skip
def test_a_malformed_answer_of_a_batch_function_is_typed(value, outcome):
    rewards = RewardSet([Reward(name="trl", function=from_trl(lambda completions: value))], LENIENT)
    scored = score(rewards, [rollout(), rollout()])
    assert scored[1].status is RolloutStatus.FAILED
    assert f"{outcome}" in (scored[1].error or "")
    assert rewards.take_metrics()[f"reward/errors/{outcome}"] >= 1


def test_a_trl_function_reads_messages_with_images_in_parts():
    seen = {}
    image = {"type": "image", "digest": "0" * 64}
    shown = {"role": "tool", "content": [{"type": "text", "text": "see"}, image]}
    given = rollout("7")
    given = replace(given, messages=(*given.messages, shown), call_messages=(1,))
    reward = from_trl(lambda completions: seen.update(completions=completions) or [1.0], conversational=True)
    assert score(RewardSet([Reward(name="trl", function=reward)]), [given])[0].reward == 1.0
    assert seen["completions"] == [[{"role": "assistant", "content": "7"}, shown]]


def test_async_trl_functions_and_texts():
    async def reward(prompts, completions, **_):
        return [float(p == "q" and c == "7") for p, c in zip(prompts, completions, strict=True)]

    rewards = RewardSet([Reward(name="trl", function=from_trl(reward, conversational=False))])
    assert [one.reward for one in score(rewards, [rollout("7"), rollout("8")])] == [1.0, 0.0]


def test_a_setting_that_a_trl_function_does_not_take_is_refused():
    def close_to(completions, limit):
        return [limit] * len(completions)

    assert from_trl(close_to, limit=1).function is close_to
    with pytest.raises(ConfigError, match=r"takes completions, limit: leave out reward\.settings\.close_to\.limt"):
        from_trl(close_to, limt=1)
