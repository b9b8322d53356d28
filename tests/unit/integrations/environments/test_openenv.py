"""Episodes on a real server of openenv-core, on loopback, and on servers that lie."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lockstep.integrations.environments.openenv import OpenEnvironment
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, EnvironmentFault
from lockstep.rollout.records import RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.openenv import server
from tests.fixtures.policies import CHAT, TOKENIZER, Policy, play, sampling

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def numbers() -> Iterator[str]:
    with server("2") as url:
        yield url


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def guessing(url: str, **settings: Any) -> OpenEnvironment:
    return OpenEnvironment(
        **{"url": url, "action_field": None, "observation_field": "hint", "max_concurrent": 2, **settings}
    )


async def test_episodes_are_played_two_at_a_time_and_every_sampled_token_is_trained(numbers: str):
    sampler = Sampler(
        engine=ScriptedEngine(says(TOKENIZER, '{"number": 3}<|im_end|>')),
        chat=CHAT,
        make_environment=partial(
            make_environment, "openenv", url=numbers, action_field=None, observation_field="hint", max_concurrent=2
        ),
        max_turns=2,
        seed=0,
    )
    rollouts = await sampler.collect(
        [{"seed": seed} for seed in range(12)], samples_per_prompt=2, sampling=sampling(), step=0
    )
    assert [rollout.error for rollout in rollouts] == [None] * 24
    rewards = [rollout.outcome["environment_reward"] for rollout in rollouts]
    assert rewards[::2] == rewards[1::2], "the seed decides"
    assert set(rewards) == {1.0, -0.2}
    for rollout in rollouts:
        (row,) = rows_from_calls(rollout.calls)
        assert row.num_trained == rollout.num_sampled
        assert rollout.messages[0]["content"].startswith("between 0 and 9")
    last = guessing(numbers)
    assert (await last.reset({"seed": 0}))[0]["content"] == "between 0 and 9; 1 alive", "all others were closed"
    await last.close()


async def test_an_action_that_the_server_or_json_refuses_is_answered_to_the_model(numbers: str):
    environment = guessing(numbers)
    await environment.reset({"seed": 0, "question": "Find it."})
    for text, said in (
        ("seven", "error: the action is not JSON"),
        ("[7]", "error: the action must be a JSON object, found list"),
        ('{"number": "seven"}', "error: Invalid message: number Input should be a valid integer"),
        ('{"nummer": 7}', "number Field required"),
    ):
        step = await environment.step(message(text))
        assert said in step.messages[0]["content"]
        assert step.outcome == {"invalid_actions": 1}
    assert await environment.conclude() == {"environment_reward": 0.0}
    await environment.close()


async def test_an_environment_that_raises_or_hangs_fails_the_rollout(numbers: str):
    environment = guessing(numbers, timeout_s=2.0)
    await environment.reset({"seed": 0})
    with pytest.raises(EnvironmentFault, match=r"EXECUTION_ERROR: a bug of the environment"):
        await environment.step(message('{"number": 77}'))
    with pytest.raises(EnvironmentFault, match=r"no answer to 'step' in 2 s"):
        await environment.step(message('{"number": 78}'))
    await environment.close()
    await environment.close()


async def test_more_sessions_than_the_server_has_wait_and_then_fail_with_the_setting_to_type(numbers: str):
    held = [guessing(numbers, max_concurrent=9) for _ in range(2)]
    for environment in held:
        await environment.reset({"seed": 0})
    late = guessing(numbers, max_concurrent=9, timeout_s=1.0)
    with pytest.raises(EnvironmentFault, match=r"raise max_concurrent_envs of the server"):
        await late.reset({"seed": 0})
    await late.close()
    waiting = guessing(numbers, max_concurrent=9, timeout_s=20.0)
    opening = asyncio.create_task(waiting.reset({"seed": 0}))
    await asyncio.sleep(0.5)
    for environment in held:
        await environment.close()
    assert (await opening)[0]["role"] == "user"
    await waiting.close()


async def test_a_server_that_dies_is_a_fault_and_so_is_none(numbers: str):
    with server("1") as url:
        environment = guessing(url)
        await environment.reset({"seed": 0})
        with pytest.raises(EnvironmentFault, match="openenv: the server"):
            await environment.step(message('{"number": 79}'))
        await environment.close()
        with pytest.raises(EnvironmentFault, match="no server at http://"):
            await guessing(url).reset({"seed": 0})


async def test_mcp_tools_of_a_server_are_the_models_tools():
    with server("1", "tools") as url:
        environment = OpenEnvironment(url=url, tools=True)
        assert (await environment.reset({"question": "Double 21."}))[0]["content"] == "Double 21."
        (tool,) = environment.tools
        assert tool["function"]["name"] == "double"
        assert tool["function"]["parameters"]["required"] == ["number"]
        calls = [
            {"id": str(index), "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(
                [("double", {"number": 21}), ("duble", {"number": 1}), ("double", "no JSON")]
            )
        ]
        step = await environment.step(message("", tool_calls=calls))
        assert step.messages[0]["content"] == "42"
        assert all(reply["content"].startswith("error: ") for reply in step.messages[1:])
        assert [reply["tool_call_id"] for reply in step.messages] == ["0", "1", "2"]
        assert (await environment.step(message("It is 42."))).done
        await environment.close()


@asynccontextmanager
async def lying(answer: Callable[[dict[str, Any]], str]) -> AsyncIterator[str]:
    """Serve `/ws` with made-up answers; yield the address."""

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for asked in socket:
            if asked.type is aiohttp.WSMsgType.TEXT:
                await socket.send_str(answer(json.loads(asked.data)))
        return socket

    app = web.Application()
    app.router.add_get("/ws", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "answer",
    [
        "no JSON",
        "[]",
        "null",
        '{"type": "observation", "data": {"observation": {}}}',
        '{"type": "observation", "data": {"observation": "text", "done": false}}',
        '{"type": "state", "data": {"observation": {}, "done": false}}',
        '{"type": "error", "data": "none"}',
    ],
)
async def test_a_server_that_lies_fails_the_rollout(answer: str):
    async with lying(lambda asked: answer) as url:
        environment = OpenEnvironment(url=url)
        with pytest.raises(EnvironmentFault, match="openenv: the server answered"):
            await environment.reset({"seed": 0})
        await environment.close()


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "1e400", "1e300", "1" * 401, '"1"', "[1]"])
async def test_a_reward_that_is_not_a_number_fails_the_rollout(reward: str):
    def answer(asked: dict[str, Any]) -> str:
        value = "null" if asked["type"] == "reset" else reward
        return f'{{"type": "observation", "data": {{"observation": {{}}, "done": false, "reward": {value}}}}}'

    async with lying(answer) as url:
        environment = OpenEnvironment(url=url)
        await environment.reset({"seed": 0})
        with pytest.raises(EnvironmentFault, match="expected a finite number"):
            await environment.step(message("hello"))
        await environment.close()


async def test_a_field_that_the_observation_lacks_is_a_setting_to_change():
    async with lying(
        lambda asked: '{"type": "observation", "data": {"observation": {"text": "a"}, "done": false}}'
    ) as url:
        environment = OpenEnvironment(url=url, observation_field="hint")
        with pytest.raises(
            ConfigError, match=r"no field hint; it has text; set environment\.settings\.observation_field"
        ):
            await environment.reset({"seed": 0})
        await environment.close()


def observed(**observation: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": observation, "done": False}})


def refused(code: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": "no"}})


async def test_a_field_that_an_observation_had_before_is_a_fault_of_the_server():
    async with lying(lambda asked: observed(hint="a") if asked["type"] == "reset" else observed()) as url:
        rollout = await play(OpenEnvironment(url=url, observation_field="hint"), Policy(lambda prompt: "hm"))
    assert rollout.status is RolloutStatus.FAILED
    assert "EnvironmentFault: environment openenv: the observation has no field hint" in str(rollout.error)


@pytest.mark.parametrize(
    "answer",
    [refused("CAPACITY_REACHED"), refused("SESSION_ERROR"), "[" * 10**5, observed(a=[[[]]] * 1)[:-1], '{"a":' * 200,
     "x" * 2**23, '{"type": "error", "data": {"code": {}}}'],
    ids=["full", "session", "deep", "cut", "open", "long", "code"],
)  # fmt: skip
async def test_any_other_answer_to_a_step_fails_the_episode(answer: str):
    async with lying(lambda asked: observed() if asked["type"] == "reset" else answer) as url:
        rollout = await play(OpenEnvironment(url=url), Policy(lambda prompt: "hm"))
    assert rollout.status is RolloutStatus.FAILED
    assert str(rollout.error).startswith("EnvironmentFault: openenv: ")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (refused("VALIDATION_ERROR"), "lists no tools that can be used: no: no details"),
        (refused("CAPACITY_REACHED"), "the environment failed (CAPACITY_REACHED: no)"),
        (observed(), "lists no tools (KeyError: 'tools')"),
        (observed(tools=[5]), "lists no tools (TypeError"),
        (observed(tools=[{"name": "a b", "input_schema": {"type": "object"}}]), "a name that models cannot write"),
        (
            observed(tools=[{"name": "a", "input_schema": {"type": "object", "$ref": "http://x/y"}}]),
            "nothing is fetched",
        ),
        (observed(tools=[{"name": "a", "input_schema": {"type": "object", "$ref": "#"}}]), "refers to itself"),
        (observed(tools=[{"name": "a", "input_schema": []}]), "expected arguments of type object"),
    ],
)
async def test_a_list_of_tools_that_is_refused_or_cannot_be_used_fails_the_episode(answer: str, says: str):
    async with lying(lambda asked: observed() if asked["type"] == "reset" else answer) as url:
        rollout = await play(OpenEnvironment(url=url, tools=True), Policy(lambda prompt: "hm"))
    assert rollout.status is RolloutStatus.FAILED
    assert says in str(rollout.error)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match=r"url=None is not an address"):
        make_environment("openenv")
    with pytest.raises(ConfigError, match="max_concurrent=0"):
        make_environment("openenv", url="http://127.0.0.1:1", max_concurrent=0)
