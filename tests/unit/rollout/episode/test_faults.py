"""Faults of environments: whatever their methods raise, return or wait for costs their own episode and no other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.rollout.episode.environment import Step
from lockstep.rollout.episode.episode import run_episode
from lockstep.rollout.errors import (
    CallLimitError,
    ConfigError,
    DataError,
    EngineError,
    EvidenceError,
    RequestError,
    SearchError,
)
from lockstep.rollout.records import Message, Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.system import deadline
from tests.fixtures.policies import CHAT, Policy, play, sampling

METHODS = ("reset", "tools", "step", "conclude", "close")
ERRORS: dict[str, Callable[[], BaseException]] = {
    "key": lambda: KeyError("number"),
    "recursion": lambda: RecursionError("maximum recursion depth exceeded"),
    "memory": lambda: MemoryError(),
    "overflow": lambda: OverflowError("int too large to convert to float"),
    "canceled": lambda: asyncio.CancelledError(),
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt(),
    "generator exit": lambda: GeneratorExit(),
    "group": lambda: BaseExceptionGroup("several", [KeyError(1), SystemExit(2)]),
    "timeout": lambda: TimeoutError("of the environment"),
    "stop": lambda: StopAsyncIteration(),
    "unprintable": lambda: ValueError(10**5000),
    "data": lambda: DataError("a bad row"),
    "search": lambda: SearchError("no answer"),
    "engine of another": lambda: EngineError("a teacher is gone"),
    "request of another": lambda: RequestError("a request of its own"),
    "evidence": lambda: EvidenceError("bad evidence"),
    "limit": lambda: CallLimitError("of its own"),
}


class Faulty:
    """Does what it is told in one of its methods, and answers correctly in all others."""

    def __init__(self, method: str, act: Callable[[], Any]) -> None:
        self._method, self._act = method, act
        self.num_closed = 0

    async def _do(self, method: str, value: Any) -> Any:
        if method != self._method:
            return value
        done = self._act()
        return await done if asyncio.iscoroutine(done) else done

    @property
    def tools(self) -> Any:
        return self._act() if self._method == "tools" else ()

    async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
        return await self._do("reset", [{"role": "user", "content": "go"}])

    async def step(self, message: Message) -> Step:
        return await self._do("step", Step(done=True, outcome={"steps": 1}))

    async def conclude(self) -> Mapping[str, Any]:
        return await self._do("conclude", {})

    async def close(self) -> None:
        self.num_closed += 1
        await self._do("close", None)


def raiser(make: Callable[[], BaseException]) -> Callable[[], Any]:
    def act() -> Any:
        raise make()

    return act


async def played(method: str, act: Callable[[], Any], **settings: Any) -> Rollout:
    environment = Faulty(method, act)
    rollout = await play(environment, Policy(lambda prompt: "aye"), **settings)
    assert environment.num_closed == 1
    return rollout


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("method", METHODS)
async def test_any_error_of_any_method_fails_the_episode_with_its_reason(method: str, name: str):
    rollout = await played(method, raiser(ERRORS[name]))
    if name == "limit" and method in ("step", "conclude"):  # the episode ends there, and its samples are trained
        assert rollout.status in (RolloutStatus.MAX_TURNS, RolloutStatus.COMPLETED)
        return
    assert rollout.status is RolloutStatus.FAILED
    assert type(ERRORS[name]()).__name__ in str(rollout.error)
    if rollout.error is not None and rollout.error.startswith("EnvironmentFault"):
        assert f"Faulty.{method} raised " in rollout.error
        assert "test_faults.py: " in rollout.error


@pytest.mark.parametrize("method", METHODS)
async def test_an_error_of_settings_ends_the_run(method: str):
    with pytest.raises(ConfigError, match="not a setting"):
        await played(method, raiser(lambda: ConfigError("not a setting")))


async def test_a_dead_engine_ends_the_run_also_if_the_environment_hides_it():
    class Hides:
        tools = ()
        max_calls = None

        def host(self, open_conversation: Any) -> None:
            self.open = open_conversation

        async def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
            try:
                await self.open([{"role": "user", "content": "x"}]).ask()
            except EngineError as error:
                raise BaseExceptionGroup("hidden", [error]) from None
            return []

        async def step(self, message: Message) -> Step:
            return Step(done=True)

    with pytest.raises(EngineError, match="dead"):
        await play(Hides(), Policy(lambda prompt: "aye", fails=lambda prompt: EngineError("dead")))


@pytest.mark.parametrize(
    ("method", "value", "says"),
    [
        ("reset", None, "Faulty.reset returned None; expected a list of messages"),
        ("reset", "go", "Faulty.reset returned str"),
        ("reset", [{"content": "go"}], "expected a mapping with a role"),
        ("reset", [], "returned no messages"),
        ("reset", [{"role": "user", "content": 5}], "with the content 5"),
        ("tools", 5, "Faulty.tools holds int"),
        ("tools", [{"type": "function"}], "expected the OpenAI form"),
        ("step", None, "Faulty.step returned None"),
        ("step", Step(), "neither messages nor done=True"),
        ("step", Step(messages=({"role": "user", "content": b"x"},)), "with the content b"),
        ("step", Step(done=True, outcome=[1]), "an outcome of type list"),  # type: ignore[arg-type]
        ("step", Step(done=True, outcome={1: 2}), "expected a mapping with texts as keys"),  # type: ignore[dict-item]
        ("conclude", [("a", 1)], "an outcome of type list"),
        ("conclude", {str(n): n for n in range(1001)}, "an outcome of 1001 facts"),
    ],
)
async def test_a_value_of_another_type_fails_the_episode(method: str, value: Any, says: str):
    rollout = await played(method, lambda: value)
    assert rollout.status is RolloutStatus.FAILED
    assert says in str(rollout.error)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "fact",
    [10**400, -(10**4400), 1e101, math.inf, math.nan, np.float32("inf"), [1, [2, {"a": 10**400}]], {"a": {1: 2}}, b"x",
     {1, 2}, object(), CYCLE, torch.ones(2), Decimal("1e400"), 2j],
    ids=lambda fact: type(fact).__name__,
)  # fmt: skip
@pytest.mark.parametrize("method", ["step", "conclude"])
async def test_a_fact_that_is_not_a_json_value_of_sane_size_fails_the_episode(method: str, fact: Any):
    outcome = {"environment_reward": fact}
    rollout = await played(method, lambda: Step(done=True, outcome=outcome) if method == "step" else outcome)
    assert rollout.status is RolloutStatus.FAILED
    assert f"Faulty.{method} returned the outcome 'environment_reward': found" in str(rollout.error)
    assert "environment_reward" not in rollout.outcome


async def test_numbers_and_arrays_of_other_libraries_become_plain_numbers():
    outcome = {
        **{"a": np.float32(0.5), "b": np.int64(3), "c": np.array([1, 2]), "d": torch.tensor(2.0), "e": Decimal("0.5")},
        **{"f": np.bool_(True), "g": None, "h": "text", "i": (1, {"x": [True]}), "j": 10**60},
    }
    rollout = await played("conclude", lambda: outcome)
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.outcome == {
        **{"steps": 1, "a": 0.5, "b": 3, "c": [1, 2], "d": 2.0, "e": 0.5, "f": True, "g": None, "h": "text"},
        **{"i": [1, {"x": [True]}], "j": 10**60},
    }
    assert [type(rollout.outcome[name]) for name in "abdf"] == [float, int, float, bool]


@pytest.mark.parametrize("method", ["reset", "step", "conclude", "close"])
async def test_a_method_that_does_not_return_fails_the_episode_at_its_limit(method: str):
    rollout = await limited(Faulty(method, lambda: asyncio.Event().wait()))
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == (
        f"EnvironmentFault: Faulty.{method} did not return in 0.05 s; raise environment.call_timeout_s"
    )


@pytest.mark.parametrize("method", ["reset", "step", "conclude", "close"])
async def test_a_method_that_ignores_its_cancellation_fails_the_episode(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadline, "GRACE_S", 0.05)
    release = asyncio.Event()

    async def deaf() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    rollout = await limited(Faulty(method, deaf))
    release.set()
    assert rollout.status is RolloutStatus.FAILED
    assert f"Faulty.{method} did not return in 0.05 s" in str(rollout.error)


async def test_the_limit_leaves_out_the_engine_and_what_has_a_limit_of_its_own():
    class Patient(Faulty):
        max_calls = None

        def host(self, open_conversation: Any) -> None:
            self.open = open_conversation

        async def step(self, message: Message) -> Step:
            await asyncio.gather(*(self.open([{"role": "user", "content": "slow"}]).ask() for _ in range(2)))
            await deadline.call_with_deadline(asyncio.sleep, 0.2, timeout_s=5)
            with deadline.uncounted():
                await asyncio.sleep(0.2)
            return Step(done=True)

    slow = Policy(lambda prompt: "aye", delay_s=lambda prompt: 0.2 if "slow" in prompt else 0.0)
    rollout = await limited(Patient("", lambda: None), slow)
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert len(rollout.calls) == 3


async def test_a_canceled_episode_closes_its_environment():
    began = asyncio.Event()

    async def hang() -> None:
        began.set()
        await asyncio.Event().wait()

    environment = Faulty("step", hang)
    task = asyncio.create_task(play(environment, Policy(lambda prompt: "aye")))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.num_closed == 1


async def limited(environment: Any, engine: Any = None) -> Rollout:
    return await run_episode(
        engine=engine or Policy(lambda prompt: "aye"),
        chat=CHAT,
        environment=environment,
        example={"question": "go"},
        sampling=sampling(),
        max_turns=2,
        rollout_id=0,
        group_id=0,
        seed=1,
        call_timeout_s=0.05,
    )


@pytest.mark.parametrize("name", ERRORS)
async def test_a_constructor_that_raises_fails_its_episodes_and_no_other(name: str):
    made = 0

    def make() -> Any:
        nonlocal made
        made += 1
        if made in (2, 3):  # the first is for what episodes share
            raise ERRORS[name]()
        return Faulty("", lambda: None)

    sampler = Sampler(engine=Policy(lambda prompt: "aye"), chat=CHAT, make_environment=make, max_turns=1, seed=0)
    rows = [{"question": "a"}, {"question": "b"}]
    if name == "engine of another":
        return  # of a constructor it is the engine's, for all that is known
    rollouts = await sampler.collect(rows, samples_per_prompt=2, sampling=sampling(), step=0)
    failed = [rollout for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
    if name != "request of another":  # tried again
        assert len(failed) == 2
        assert all(type(ERRORS[name]()).__name__ in str(rollout.error) for rollout in failed)
    assert [rollout.rollout_id for rollout in rollouts] == [0, 1, 2, 3]


async def test_an_engine_with_a_bug_ends_the_run():
    class Broken(Policy):
        async def generate(self, *_: Any) -> Any:
            raise ValueError("a bug of the engine")

    with pytest.raises(EngineError, match="the engine raised ValueError: a bug of the engine"):
        await play(Faulty("", lambda: None), Broken(lambda prompt: "aye"))


async def test_a_method_that_is_not_async_fails_the_episode_with_what_to_write():
    class Plain:
        tools = ()

        def reset(self, example: Mapping[str, Any]) -> Sequence[Message]:
            return [{"role": "user", "content": "go"}]

        async def step(self, message: Message) -> Step:
            return Step(done=True)

    rollout = await play(Plain(), Policy(lambda prompt: "aye"))
    assert rollout.error == "EnvironmentFault: Plain.reset is not async; write `async def reset`"
