"""Whatever rewards, tools and environments return or raise costs their own rollout or call, and nothing else.

`HYPOTHESIS_PROFILE=explore` tries more inputs.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lockstep.rewards.composition import FaultTolerance, Reward, RewardSet
from lockstep.rewards.signatures import adapt
from lockstep.rollout.environments.toolbox import Toolbox
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.records import EngineCall, FinishReason, Message, Rollout, RolloutStatus
from lockstep.rollout.saved_rollouts import from_json, to_json
from lockstep.trainer.observe.step_metrics import outcome_metrics
from lockstep.trainer.observe.transcript import conversation
from tests.fixtures.hostile_values import ERRORS, NUMBERS, TEXTS, VALUES
from tests.fixtures.policies import Policy, play

Act = tuple[str, Any]
"""Behavior of a function: `("return", value)` or `("raise", maker of the error)`."""
ACTS = st.tuples(st.just("return"), VALUES) | st.tuples(st.just("raise"), ERRORS)
LENIENT = FaultTolerance(max_error_rate=1.0)
HERE: list[Act] = [("return", 0.0)]


def do(act: Act) -> Any:
    kind, value = act
    if kind == "raise":
        raise value()
    return value


def by_rollout(rollout: Rollout) -> Any:
    return do(HERE[0])


def by_group(rollouts: Sequence[Rollout]) -> Any:
    return do(HERE[0])


def by_batch(prompts: Any, completions: Any, **columns: Any) -> Any:
    return do(HERE[0])


async def awaited(rollout: Rollout) -> Any:
    return do(HERE[0])


def rollouts() -> list[Rollout]:
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-0.5,), finish_reason=FinishReason.STOP)
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    return [
        Rollout(
            rollout_id=number, group_id=0, calls=(call,), messages=messages, call_messages=(1,), example={"answer": "a"}
        )
        for number in range(2)
    ]


def check_kept(rollout: Rollout) -> None:
    """Raise an error unless a page, a file and the metrics can hold the rollout."""
    assert math.isfinite(rollout.reward)
    assert all(math.isfinite(value) for value in rollout.rewards.values())
    assert rollout.status is not RolloutStatus.FAILED or rollout.error
    text = json.dumps(to_json(rollout))
    assert from_json(json.loads(text)).reward == rollout.reward
    conversation(rollout, wrapped=True)
    assert all(math.isfinite(value) for value in outcome_metrics([rollout, rollout]).values())


@given(
    function=st.sampled_from([by_rollout, by_group, by_batch, awaited]),
    act=ACTS | st.tuples(st.just("return"), st.lists(NUMBERS | st.none(), min_size=2, max_size=2)),
    weight=st.sampled_from([1.0, -2.0, 1e308]),
)
def test_any_reward_is_a_number_or_costs_its_rollouts(function: Callable[..., Any], act: Act, weight: float) -> None:
    HERE[0] = act
    adapted = adapt(function.__name__, function, {})
    scored = asyncio.run(RewardSet([Reward(name="it", function=adapted, weight=weight)], LENIENT).score(rollouts()))
    assert len(scored) == 2
    for rollout in scored:
        check_kept(rollout)


def returns(text: str) -> Any:
    """Do anything.

    Args:
        text: anything
    """
    return do(HERE[0])


async def returns_later(text: str) -> Any:
    """Do anything, later.

    Args:
        text: anything
    """
    return do(HERE[0])


@given(function=st.sampled_from([returns, returns_later]), act=ACTS, arguments=VALUES, identity=VALUES)
def test_any_result_of_a_tool_is_a_text(function: Callable[..., Any], act: Act, arguments: Any, identity: Any) -> None:
    HERE[0] = act
    for given_arguments in ({"text": "x"}, arguments):
        call = {"id": "1", "type": "function", "function": {"name": function.__name__, "arguments": given_arguments}}
        (result,) = asyncio.run(Toolbox([function]).answer({"role": "assistant", "content": "", "tool_calls": [call]}))
        assert isinstance(result.content, str)
        result.content.encode()


class Foreign:
    """An environment of which each method does what it was given."""

    def __init__(self, acts: Mapping[str, Act]) -> None:
        self._acts = acts

    def _do(self, method: str, otherwise: Any) -> Any:
        return do(self._acts[method]) if method in self._acts else otherwise

    @property
    def tools(self) -> Any:
        return self._do("tools", ())

    async def reset(self, example: Mapping[str, Any]) -> Any:
        return self._do("reset", [{"role": "user", "content": "go"}])

    async def step(self, message: Message) -> Any:
        return self._do("step", Step(done=True))

    async def conclude(self) -> Any:
        return self._do("conclude", {})

    async def close(self) -> Any:
        return self._do("close", None)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "tool", "assistant"]) | VALUES},
        optional={"content": VALUES, "name": VALUES},
    ),
    max_size=3,
)
FACTS = st.dictionaries(TEXTS | st.sampled_from(["environment_reward", "turns"]), VALUES, max_size=3)
STEPS = st.builds(Step, messages=MESSAGES | VALUES, done=st.booleans() | VALUES, outcome=FACTS | VALUES)


@given(
    acts=st.dictionaries(st.sampled_from(["reset", "tools", "step", "conclude", "close"]), ACTS, max_size=2)
    | st.fixed_dictionaries({"step": st.tuples(st.just("return"), STEPS)})
    | st.fixed_dictionaries({"reset": st.tuples(st.just("return"), MESSAGES)})
    | st.fixed_dictionaries({"conclude": st.tuples(st.just("return"), FACTS)})
)
def test_any_environment_costs_its_own_episode(acts: dict[str, Act]) -> None:
    rollout = asyncio.run(play(Foreign(acts), Policy(lambda prompt: "aye"), max_turns=2))
    check_kept(rollout)
