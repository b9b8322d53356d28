"""Episodes of agents that know a URL and a key, over a scripted engine."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections import Counter
from functools import partial
from typing import Any

import openai
import pytest

from lockstep.integrations.environments.agent import AgentEnvironment
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.environments.mixed import Mixed
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.records import FinishReason, Rollout, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.gateway import ScriptedEngine, running, says
from tests.fixtures.tokenizers import chat_tokenizer

QWEN = chat_tokenizer("qwen3")
CHAT = Chat(QWEN)


def engine_saying(*turns: str, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(says(QWEN, *turns), **options)


async def collect(
    agent: Any, engine: ScriptedEngine, *, prompts: int = 1, samples: int = 1, **settings
) -> list[Rollout]:
    max_turns, chat = settings.pop("max_turns", 8), settings.pop("chat", CHAT)
    sampler = Sampler(
        engine=engine,
        chat=chat,
        make_environment=partial(make_environment, "agent", agent=agent, **settings),
        max_turns=max_turns,
        seed=5,
    )
    return await sampler.collect(
        [{"question": f"question {i}"} for i in range(prompts)],
        samples_per_prompt=samples,
        sampling=Sampling(max_tokens=64, stop_token_ids=CHAT.stop_token_ids),
        step=0,
    )


async def two_turns(base_url: str, api_key: str, example: dict[str, Any]) -> dict[str, Any]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": example["question"]}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="gpt-4o", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    return {"steps": 2, "note": "fine"}


def blocking(base_url: str, api_key: str, example: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": example["question"]}])


async def blocking_in_async(base_url: str, api_key: str, example: dict[str, Any]) -> None:
    blocking(base_url, api_key, example)


async def test_an_agent_gives_rollouts_like_any_environment():
    seen: list[Rollout] = await collect(two_turns, engine_saying("fine<|im_end|>"), prompts=2, samples=3)
    assert [(r.rollout_id, r.group_id) for r in seen] == [(i, i // 3) for i in range(6)]
    for rollout in seen:
        assert rollout.status is RolloutStatus.COMPLETED
        assert len(rollout.calls) == 2
        assert len(rollout_rows := rows_from_calls(rollout.calls)) == 1
        assert rollout_rows[0].num_trained == rollout.num_sampled
        assert rollout.outcome == {"steps": 2, "note": "fine", "prompts_root": 1, "prompts_extended": 1}
        assert [m["content"] for m in rollout.messages] == [rollout.example["question"], "fine", "go on", "fine"]


async def test_a_row_can_name_an_agent_beside_environments():
    def count(base_url: str, api_key: str, example: dict[str, Any]) -> dict[str, Any]:
        blocking(base_url, api_key, example)
        return {"by_agent": 1}

    sampler = Sampler(
        engine=engine_saying("fine<|im_end|>"),
        chat=CHAT,
        make_environment=partial(
            make_environment,
            "mixed",
            environments={"agent": {"agent": count}, "single_turn": {}},
            default="single_turn",
        ),
        max_turns=2,
        seed=5,
    )
    rows = [{"question": "a", "environment": "agent"}, {"question": "b"}]
    sampling = Sampling(max_tokens=64, stop_token_ids=CHAT.stop_token_ids)
    of_agent, of_environment = await sampler.collect(rows, samples_per_prompt=1, sampling=sampling, step=0)
    assert of_agent.outcome["by_agent"] == 1
    assert "by_agent" not in of_environment.outcome
    for rollout, question in ((of_agent, "a"), (of_environment, "b")):
        assert rollout.status is RolloutStatus.COMPLETED
        assert [message["content"] for message in rollout.messages] == [question, "fine"]
        assert len(rollout.calls) == 1


async def test_two_kinds_of_agents_share_one_gateway_with_limits_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """With a gateway each, the second could not listen on the port of the settings."""
    running, most = Counter[str](), Counter[str]()

    async def counted(base_url: str, api_key: str, example: dict[str, Any]) -> None:
        kind = example["environment"]
        running[kind] += 1
        most[kind] = max(most[kind], running[kind])
        await two_turns(base_url, api_key, example)
        running[kind] -= 1

    class OtherAgent(AgentEnvironment):
        pass

    classes = {"agent": AgentEnvironment, "other": OtherAgent}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parts = {"agent": {"agent": counted, "max_concurrent": 1}, "other": {"agent": counted}}
    sampler = Sampler(
        engine=engine_saying("fine<|im_end|>"),
        chat=CHAT,
        make_environment=lambda: Mixed(parts, make=lambda name, **own: classes[name](**own)),
        max_turns=2,
        seed=5,
        gateway=GatewaySettings(port=port),
    )
    rows = [{"question": "a", "environment": name} for name in parts]
    sampling = Sampling(max_tokens=64, stop_token_ids=CHAT.stop_token_ids)
    rollouts = await sampler.collect(rows, samples_per_prompt=4, sampling=sampling, step=0)
    assert [rollout.error for rollout in rollouts] == [None] * 8
    assert most["agent"] == 1
    assert most["other"] > 1


def agent_of_kept_client(kept: str) -> Any:
    """Return an agent that keeps a client between episodes: connections by URL, as `ChatOpenAI`, or in general, or
    connections and key by URL."""

    @functools.cache
    def connections(url: str) -> Any:
        return openai.DefaultAsyncHttpxClient()

    def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
        http = connections(base_url if kept == "by URL" else "")
        return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)

    by_url: dict[str, openai.AsyncOpenAI] = {}

    async def agent(base_url: str, api_key: str, example: dict[str, Any]) -> None:
        if kept == "with its key":
            by_url.setdefault(base_url, openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0))
        asking = by_url.get(base_url) or client(base_url, api_key)
        for _ in range(2):
            await asking.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

    return agent


@pytest.mark.parametrize(
    ("kept", "settings"),
    [
        ("by URL", {}),
        ("with its key", {}),
        ("in general", {"max_concurrent": 1}),
        ("by URL", {"shared_loop": True}),
        ("with its key", {"shared_loop": True}),
        ("in general", {"shared_loop": True}),
    ],
)
async def test_an_agent_may_keep_its_client_between_episodes(kept, settings):
    sampler = Sampler(
        engine=engine_saying("fine<|im_end|>"),
        chat=CHAT,
        make_environment=partial(make_environment, "agent", agent=agent_of_kept_client(kept), **settings),
        max_turns=2,
        seed=5,
    )
    sampling = Sampling(max_tokens=64, stop_token_ids=CHAT.stop_token_ids)
    async with sampler.open(sampling) as run:
        for update in range(3):
            rollouts = await sampler.collect([{}] * 2, samples_per_prompt=4, sampling=sampling, step=update, run=run)
            assert [rollout.error for rollout in rollouts] == [None] * 8
            assert [len(rollout.calls) for rollout in rollouts] == [2] * 8


async def test_a_client_of_another_loop_is_named_with_the_setting_that_helps():
    """A judge that an agent asks has one URL, and connections that stay open."""
    lasting = openai.AsyncOpenAI(base_url="http://x/v1", api_key="x", max_retries=0)

    async def agent(base_url: str, api_key: str, example: dict[str, Any]) -> None:
        nonlocal lasting
        await two_turns(base_url, api_key, example)
        await lasting.with_options(base_url=example["judge"]).models.list()

    async with running(QWEN, "fine<|im_end|>") as judge:
        for settings, is_lost in (({}, True), ({"shared_loop": True}, False)):
            lasting = openai.AsyncOpenAI(base_url="http://x/v1", api_key=judge.gateway.api_key, max_retries=0)
            sampler = Sampler(
                engine=engine_saying("fine<|im_end|>"),
                chat=CHAT,
                make_environment=partial(make_environment, "agent", agent=agent, max_concurrent=1, **settings),
                max_turns=2,
                seed=5,
            )
            rollouts = await sampler.collect(
                [{"question": "a", "judge": judge.gateway.base_url}],
                samples_per_prompt=4,
                sampling=Sampling(max_tokens=64, stop_token_ids=CHAT.stop_token_ids),
                step=0,
            )
            errors = [rollout.error for rollout in rollouts if rollout.error]
            assert bool(errors) is is_lost
            assert all("set environment.settings.shared_loop=true" in error for error in errors)


def test_a_plain_function_has_no_loop_to_share():
    with pytest.raises(ConfigError, match="leave shared_loop out"):
        make_environment("agent", agent=blocking, shared_loop=True)


@pytest.mark.parametrize("agent", [blocking, blocking_in_async])
async def test_an_agent_that_blocks_its_thread_blocks_no_other_episode(agent):
    rollouts = await asyncio.wait_for(collect(agent, engine_saying("fine<|im_end|>"), samples=8), 30)
    assert all(rollout.status is RolloutStatus.COMPLETED for rollout in rollouts)


async def test_the_same_seeds_give_the_same_requests_in_every_run():
    async def seeds() -> list[int | None]:
        engine = engine_saying("fine<|im_end|>")
        await collect(two_turns, engine, samples=4)
        return sorted(sampling.seed or 0 for sampling in engine.samplings)

    first = await seeds()
    assert len(set(first)) == 8
    assert await seeds() == first


async def test_an_agent_that_raises_fails_its_own_rollout_only():
    async def agent(base_url, api_key, example):
        await two_turns(base_url, api_key, example)
        if example["question"] == "question 0":
            raise ValueError("cannot read the answer")

    failed, fine = await collect(agent, engine_saying("fine<|im_end|>"), prompts=2)
    assert failed.status is RolloutStatus.FAILED
    assert "test_agent.py: cannot read the answer" in (failed.error or "")
    assert fine.status is RolloutStatus.COMPLETED


@pytest.mark.parametrize("swallows", [True, False])
async def test_an_agent_at_its_limit_of_turns_keeps_its_samples(swallows):
    async def agent(base_url, api_key, example):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            try:
                while True:
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "again"}])
            except openai.BadRequestError:
                if not swallows:
                    raise

    (rollout,) = await collect(agent, engine_saying("fine<|im_end|>"), max_turns=3)
    assert rollout.status is RolloutStatus.MAX_TURNS
    assert len(rollout.calls) == 3
    assert rollout.is_trainable


async def test_a_full_context_ends_the_episode_and_keeps_its_samples():
    async def agent(base_url, api_key, example):
        messages: list[Any] = [{"role": "user", "content": "word " * 10}]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            while True:
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "word " * 10}]

    (rollout,) = await collect(agent, engine_saying("fine<|im_end|>", max_model_len=100))
    assert rollout.status is RolloutStatus.CONTEXT_FULL
    assert rollout.is_trainable


async def test_a_last_turn_cut_by_length_is_a_truncated_rollout():
    engine = engine_saying("fine " * 100)
    (rollout,) = await collect(two_turns, engine)
    assert rollout.calls[-1].finish_reason is FinishReason.LENGTH
    assert rollout.status is RolloutStatus.TRUNCATED


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_agent_that_does_not_end_in_time_fails_its_rollout(kind):
    async def hangs(base_url, api_key, example):
        await asyncio.sleep(60)

    def blocks(base_url, api_key, example):
        time.sleep(15)

    started = time.perf_counter()
    (rollout,) = await collect(hangs if kind == "async" else blocks, engine_saying("fine<|im_end|>"), timeout_s=0.2)
    assert rollout.status is RolloutStatus.FAILED
    assert "did not finish" in (rollout.error or "")
    assert time.perf_counter() - started < 12


async def test_an_agent_without_a_request_fails_its_rollout():
    async def silent(base_url, api_key, example):
        return None

    (rollout,) = await collect(silent, engine_saying("fine<|im_end|>"))
    assert rollout.status is RolloutStatus.FAILED
    assert "no request" in (rollout.error or "")


async def test_a_dead_engine_ends_the_batch_even_if_agents_catch_the_error():
    async def agent(base_url, api_key, example):
        try:
            await two_turns(base_url, api_key, example)
        except openai.OpenAIError:
            return None

    engine = engine_saying("fine<|im_end|>")
    engine.error = EngineError("the engine is dead")
    with pytest.raises(EngineError, match="the engine is dead"):
        await collect(agent, engine)


async def test_a_template_that_drops_the_tools_ends_the_batch_even_if_agents_catch_the_error():
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    answered: list[int] = []

    async def agent(base_url: str, api_key: str, example: dict[str, Any]) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            try:
                await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "hi"}],
                    tools=[tool],  # type: ignore[list-item]
                )
            except openai.BadRequestError as error:
                answered.append(error.status_code)

    with pytest.raises(ConfigError, match=r"drops the tools \(get_weather\).*set model\.chat_template=hermes"):
        await collect(agent, engine_saying("fine<|im_end|>"), chat=Chat(chat_tokenizer("chatml")))
    assert answered == [400]
    (rollout,) = await collect(agent, engine_saying("fine<|im_end|>"))
    assert rollout.status is RolloutStatus.COMPLETED


async def test_an_agent_that_asks_for_calls_gets_what_the_model_samples():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    async def agent(base_url: str, api_key: str, example: dict[str, Any]) -> None:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for choice in ("required", {"type": "function", "function": {"name": "f"}}, "auto"):
                options: Any = {"tools": [tool], "tool_choice": choice}
                answer = await client.chat.completions.create(model="m", messages=messages, **options)
                messages += [answer.choices[0].message, {"role": "user", "content": "again"}]

    (rollout,) = await collect(agent, engine_saying("fine<|im_end|>"))
    assert rollout.error is None
    assert rollout.outcome == {"prompts_root": 1, "prompts_extended": 2, "unforced_calls": 2}


async def test_an_outcome_that_is_not_a_mapping_fails_the_rollout():
    async def agent(base_url, api_key, example):
        await two_turns(base_url, api_key, example)
        return 1.0

    (rollout,) = await collect(agent, engine_saying("fine<|im_end|>"))
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == ("the agent returned an outcome of type float; expected a mapping with texts as keys")


async def test_a_summarized_history_branches_and_trains_every_sampled_token():
    async def agent(base_url, api_key, example):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": "a"}]
            for turn in range(4):
                if turn == 2:
                    messages = [{"role": "user", "content": "summary of what was said"}]
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "b"}]

    (rollout,) = await collect(agent, engine_saying("fine<|im_end|>"))
    rows = rows_from_calls(rollout.calls)
    assert len(rows) == 2
    assert sum(row.num_trained for row in rows) == rollout.num_sampled


def test_a_missing_agent_is_refused_with_the_setting():
    with pytest.raises(ConfigError, match=r"environment\.settings\.agent=path/to/file\.py:function"):
        make_environment("agent")


def test_an_agent_is_loaded_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text("async def play(base_url, api_key, example): return None\n")
    assert make_environment("agent", agent=f"{tmp_path}/mine.py:play").function.__name__ == "play"  # type: ignore[attr-defined]


async def test_a_text_that_an_agent_returns_is_the_fact_answer():
    async def agent(base_url, api_key, example):
        await two_turns(base_url, api_key, example)
        return "42"

    (rollout,) = await collect(agent, engine_saying("fine<|im_end|>"))
    assert rollout.status is RolloutStatus.COMPLETED
    assert rollout.outcome["answer"] == "42"


def test_an_agent_with_other_parameters_is_refused():
    def agent(client, row):
        return None

    with pytest.raises(ConfigError, match=r"agent\(client, row\) cannot be called with \(base_url, api_key, example\)"):
        AgentEnvironment(agent)
    AgentEnvironment(functools.partial(lambda url, key, example, depth: None, depth=2))
