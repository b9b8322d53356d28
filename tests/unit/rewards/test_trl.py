"""Reward functions with TRL's signature."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.rewards.composition import Reward, RewardSet
from lockstep.rewards.outcomes import Outcome
from lockstep.rewards.trl import from_trl
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import RolloutStatus
from tests.fixtures.vision import images_in, picture
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


def test_a_trl_function_reads_images_with_their_pixels_in_messages_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_images = images_in(tmp_path, monkeypatch)
    seen = {}
    first, second = ({"type": "image", "digest": run_images.add(picture(number))} for number in (1, 2))
    text = {"type": "text", "text": "see"}
    given = rollout("7")
    messages = (
        {"role": "user", "content": [first, text]},
        {"role": "assistant", "content": "7"},
        {"role": "tool", "content": [text, second]},
    )
    example = {"prompt": "see", "images": [first], "image": first, "answer": "7"}
    given = replace(given, messages=messages, call_messages=(1,), example=example)
    reward = from_trl(lambda **columns: seen.update(columns) or [1.0])
    assert score(RewardSet([Reward(name="trl", function=reward)]), [given])[0].reward == 1.0
    [[prompt]], [[answer, tool]] = seen["prompts"], seen["completions"]
    assert answer == {"role": "assistant", "content": "7"}
    assert (prompt["content"][1], tool["content"][0]) == (text, text)
    of_prompt, of_tool = prompt["content"][0], tool["content"][1]
    assert (of_prompt["type"], of_prompt["image"]) == ("image", picture(1))
    assert (of_tool["type"], of_tool["image"]) == ("image", picture(2))
    assert seen["images"] == [[picture(1)]]
    assert seen["image"] == [picture(1)]
    assert given.messages == messages


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
