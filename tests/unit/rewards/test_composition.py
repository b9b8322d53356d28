"""Rewards: what the built-ins judge, and that no failure of a function ever becomes a score."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest

from rewards import FUNCTIONS, FaultTolerance, Outcome, Reward, RewardSet, from_trl, make_reward_set
from rewards.functions.built_in import (
    contains,
    demo_answer,
    exact_match,
    last_number,
    numeric,
    regex,
    repetition,
    soft_overlong,
    think_format,
)
from rollout.errors import ConfigError, DataError, RewardError
from rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus

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


# --- built-ins


@pytest.mark.parametrize(
    ("answer", "value"),
    [("The answer is 7", 1), (" The answer is 7\n", 1), ("The answer is 17", 0), ("7", 0), ("The answer is 7.", 0),
     ("", 0)],
)  # fmt: skip
def test_demo_answer_wants_the_right_answer_in_the_right_sentence(answer, value):
    assert demo_answer(rollout(answer)) == value


def test_a_rollout_that_ends_with_a_tool_call_has_no_answer():
    ends_in_call = Rollout(
        rollout_id=0,
        group_id=0,
        calls=(),
        messages=({"role": "assistant", "content": "7"}, {"role": "tool", "content": "7"},
                  {"role": "assistant", "content": None, "tool_calls": []}),
        example={"answer": "7"},
    )  # fmt: skip
    assert exact_match(ends_in_call) == 0
    assert demo_answer(Rollout(rollout_id=0, group_id=0, calls=(), example={"answer": "7"})) == 0


def test_exact_match_and_contains():
    assert exact_match(rollout("Paris ", reference="Paris")) == 1
    assert exact_match(rollout("paris", reference="Paris")) == 0
    assert exact_match(rollout("paris", reference="Paris"), ignore_case=True) == 1
    assert contains(rollout("it is 7, I think")) == 1
    assert contains(rollout("it is 17")) == 0
    assert contains(rollout("a+b", reference="a+b")) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("so 3 and then 7", 7), ("1,234.5", 1234.5), ("-7", -7), (r"\boxed{7} is not 8", 7), ("7.", 7),
     ("1e3", 1000), (".5", 0.5), ("none", None), ("", None), ("1e999", None), (r"\boxed{x} 3", None)],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_numeric_compares_values_not_texts():
    assert numeric(rollout("The answer is 7.0")) == 1
    assert numeric(rollout("7.01")) == 0
    assert numeric(rollout("7.01"), rel_tol=0.01) == 1
    assert numeric(rollout("no idea")) == 0
    with pytest.raises(DataError, match="holds no number"):
        numeric(rollout("7", reference="seven"))


def test_a_missing_reference_is_an_error_not_a_zero():
    for function in (demo_answer, exact_match, contains, numeric):
        with pytest.raises(DataError, match="'answer'"):
            function(rollout("7", reference=None))


def test_regex_and_format():
    assert regex(rollout("a\nb"), pattern="a.b") == 1
    assert regex(rollout("xa\nb"), pattern="a.b", full=True) == 0
    assert think_format(rollout("<think>hm</think>7")) == 1
    assert think_format(rollout("7", reasoning_content="hm")) == 1
    for bad in ("7", "<think>hm</think>", "<think>hm", "<think>a</think>b</think>c", "x<think>a</think>7"):
        assert think_format(rollout(bad)) == 0, bad


@pytest.mark.parametrize(("tokens", "value"), [(1, 0), (60, 0), (80, -0.5), (100, -1), (150, -1)])
def test_soft_overlong_follows_dapo(tokens, value):
    assert soft_overlong(rollout(tokens=tokens), max_tokens=100, buffer_tokens=40) == pytest.approx(value)


def test_repetition_is_the_share_of_repeated_ngrams():
    assert repetition(rollout("a b c d e"), ngram=2) == 0
    assert repetition(rollout("a b a b a"), ngram=2) == pytest.approx(-0.5)
    assert repetition(rollout("a"), ngram=2) == 0
    assert repetition(rollout("a " * 200), ngram=4) < -0.99


def test_settings_that_make_no_sense_are_config_errors():
    with pytest.raises(ConfigError, match="buffer_tokens"):
        soft_overlong(rollout(), max_tokens=10, buffer_tokens=20)
    with pytest.raises(ConfigError, match="ngram"):
        repetition(rollout(), ngram=0)


# --- composition


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
    (lambda r: None, Outcome.WRONG_TYPE),
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
    tolerance = FaultTolerance(timeout_s=0.2, max_error_rate=1.0)
    rewards = RewardSet([Reward(name="exact", function=exact_match), Reward(name="bad", function=function)], tolerance)
    started = time.monotonic()
    scored = score(rewards, [rollout("7"), rollout("8")])
    assert time.monotonic() - started < 2.5
    for one in scored:
        assert one.status is RolloutStatus.FAILED
        assert not one.is_trainable
        assert f"reward bad: {outcome}" in (one.error or "")
        assert one.rewards == {}
    metrics = rewards.take_metrics()
    assert metrics[f"reward/errors/{outcome}"] == 2
    assert metrics["reward/dropped"] == 2
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
    with pytest.raises(RewardError, match=r"reward raises: exception: ZeroDivisionError: oh"):
        score(RewardSet([Reward(name="raises", function=raises)], strict), [rollout()])
    with pytest.raises(ConfigError, match="expected drop, raise or a number"):
        FaultTolerance(on_error={Outcome.TIMEOUT: math.nan})
    with pytest.raises(ConfigError, match="expected one of"):
        FaultTolerance(on_error={Outcome.VALUE: "drop"})


def test_too_many_errors_in_the_window_end_the_run():
    tolerance = FaultTolerance(window=8, max_error_rate=0.5)

    def half(r):
        return 1.0 if r.rollout_id % 2 else math.nan

    rewards = RewardSet([Reward(name="half", function=half)], tolerance)
    for _ in range(4):
        score(rewards, [rollout(number=n) for n in range(8)])
    with pytest.raises(RewardError, match=r"100% of the last 8 reward calls failed, expected at most 50%.* nan"):
        score(rewards, [rollout(number=0) for _ in range(8)])


def test_a_function_cannot_change_what_others_read():
    def vandal(r):
        r.messages[-1]["content"] = "7"
        r.example["answer"] = "8"
        return 0.0

    rewards = RewardSet([Reward(name="vandal", function=vandal), Reward(name="exact", function=exact_match)])
    given = rollout("8")
    (scored,) = score(rewards, [given])
    assert scored.rewards["exact"] == 0.0
    assert given.messages[-1]["content"] == "8"


def test_rollouts_that_failed_before_are_left_alone():
    failed = Rollout(rollout_id=0, group_id=0, calls=(), status=RolloutStatus.FAILED, error="engine")
    rewards = RewardSet([Reward(name="exact", function=exact_match)])
    scored = score(rewards, [failed, rollout("7")])
    assert scored[0] is failed
    assert scored[1].reward == 1.0
    assert score(rewards, []) == []


def test_calls_run_at_the_same_time():
    def slow(r):
        time.sleep(0.3)
        return 1.0

    started = time.monotonic()
    score(RewardSet([Reward(name="slow", function=slow)]), [rollout() for _ in range(16)])
    assert time.monotonic() - started < 2.0


# --- TRL's signature


def test_a_trl_function_gets_prompts_completions_and_columns():
    seen = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, columns=columns)
        return [1.0 if c[-1]["content"] == a else None for c, a in zip(completions, answer, strict=True)]

    rewards = RewardSet([Reward(name="trl", function=from_trl(reward)), Reward(name="zero", function=lambda r: 0.0)])
    first, second = score(rewards, [rollout("7", tokens=3), rollout("8")])
    assert seen["prompts"][0] == [{"role": "user", "content": "q"}]
    assert seen["completions"][0] == [{"role": "assistant", "content": "7"}]
    assert seen["columns"] == {"question": ["q", "q"], "completion_ids": [[2, 2, 2], [2]]}
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
def test_a_batch_function_that_answers_wrongly_is_typed(value, outcome):
    rewards = RewardSet([Reward(name="trl", function=from_trl(lambda completions: value))], LENIENT)
    scored = score(rewards, [rollout(), rollout()])
    assert scored[1].status is RolloutStatus.FAILED
    assert f"{outcome}" in (scored[1].error or "")
    assert rewards.take_metrics()[f"reward/errors/{outcome}"] >= 1


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


# --- from settings


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
def test_settings_that_cannot_work_are_config_errors(arguments, says):
    with pytest.raises(ConfigError, match=says):
        make_reward_set(*arguments)


def test_every_built_in_has_a_docstring_and_is_listed_by_its_name():
    for name, function in FUNCTIONS.items():
        assert function.__name__ == name
        assert function.__doc__
