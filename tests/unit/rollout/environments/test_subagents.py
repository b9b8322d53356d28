"""Sub-agents: their calls interleave, and are part of the rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.demo.calculator import calculator
from lockstep.rollout.environments.subagents import SubAgents
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.episode.token_metrics import count_tokens
from lockstep.rollout.errors import ConfigError, EngineError, EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.gateway import ScriptedEngine
from tests.fixtures.policies import CHAT, TOKENIZER, Policy, last_turn, play, sampling, tool_call


def two_tasks(prompt: str) -> str:
    """Delegates two tasks at once; each sub-agent calculates once and says what it got."""
    if "You are given one task" in prompt:
        task = "1+1" if "add ones" in prompt else "2*3"
        return f"it is {task}" if "tool_response" in last_turn(prompt) else tool_call("calculator", expression=task)
    if "tool_response" in last_turn(prompt):
        return "done"
    return tool_call("delegate", task="add ones") + "\n" + tool_call("delegate", task="multiply")


def slow_at(task: str) -> Callable[[str], float]:
    return lambda prompt: 0.2 if task in prompt and "given one task" in prompt else 0.0


async def test_two_sub_agents_interleave_and_every_token_is_trained_once():
    engine = Policy(two_tasks, delay_s=slow_at("multiply"))
    rollout = await play(SubAgents([calculator]), engine)
    assert rollout.status is RolloutStatus.COMPLETED
    assert len(rollout.calls) == 6
    assert engine.most_at_once == 2
    tools = [turn["content"] for turn in rollout.messages if turn["role"] == "tool"]
    assert tools == ["it is 1+1", "it is 2*3"], "results in the order of the calls, not of the answers"
    rows = rows_from_calls(rollout.calls)
    assert len(rows) == 3
    assert sum(row.num_trained for row in rows) == rollout.num_sampled
    metrics = count_tokens(rollout.calls, rows).metrics()
    assert metrics["rollout/token_match_rate"] == metrics["rollout/trained_fraction"] == 1.0
    assert rollout.outcome["agents"] == 2
    assert rollout.outcome["agent_tool_calls"] == 2
    assert rollout.outcome["tool_calls"] == 2


async def test_seeds_do_not_depend_on_the_order_of_the_answers():
    multiplication_last, addition_last = (Policy(two_tasks, delay_s=slow_at(task)) for task in ("multiply", "add"))
    arrived = [
        [call.prompt_ids for call in (await play(SubAgents([calculator]), engine)).calls]
        for engine in (multiplication_last, addition_last)
    ]
    assert arrived[0] != arrived[1], "the delay must change the order of arrival"
    assert multiplication_last.seeds == addition_last.seeds
    assert len(set(multiplication_last.seeds.values())) == 6
    other = Policy(two_tasks)
    await play(SubAgents([calculator]), other, seed=2)
    assert not set(other.seeds.values()) & set(multiplication_last.seeds.values())


async def test_the_seed_of_the_first_conversation_does_not_depend_on_the_others():
    plain, hosting = Policy(lambda prompt: "done"), Policy(two_tasks)
    await play(SubAgents([calculator]), plain)
    await play(SubAgents([calculator]), hosting)
    (first,) = plain.seeds
    assert plain.seeds[first] == hosting.seeds[first]


@pytest.mark.parametrize(
    ("settings", "says", "calls"),
    [
        ({"max_agent_turns": 1}, "did not finish in 1 turns", 4),
        ({"max_calls": 3}, "3 engine calls", 3),
    ],
)
async def test_a_sub_agent_at_its_limit_is_a_tool_error(settings, says, calls):
    rollout = await play(SubAgents([calculator], **settings), Policy(two_tasks))
    errors = [turn["content"] for turn in rollout.messages if turn["role"] == "tool"]
    assert all(error.startswith("error: ") for error in errors)
    assert says in " ".join(errors)
    assert rollout.outcome["tool_errors_exception"] == 2
    assert len(rollout.calls) == calls
    assert rollout.status is (RolloutStatus.MAX_TURNS if "max_calls" in settings else RolloutStatus.COMPLETED)
    assert sum(row.num_trained for row in rows_from_calls(rollout.calls)) == rollout.num_sampled > 0


async def test_a_sub_agent_that_is_too_slow_is_a_timeout_of_the_tool():
    environment = SubAgents([calculator], agent_timeout_s=0.05)
    rollout = await play(environment, Policy(two_tasks, delay_s=slow_at("multiply")))
    assert rollout.outcome["tool_errors_timeout"] == 1
    assert rollout.status is RolloutStatus.COMPLETED
    assert sum(row.num_trained for row in rows_from_calls(rollout.calls)) == rollout.num_sampled > 0


async def test_bad_evidence_of_a_sub_agent_fails_the_rollout_though_the_tool_caught_it():
    bad = EvidenceError("logprobs are missing")
    engine = Policy(two_tasks, fails=lambda prompt: bad if "add ones" in prompt and "given one" in prompt else None)
    rollout = await play(SubAgents([calculator]), engine)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == "EvidenceError: logprobs are missing"


async def test_a_dead_engine_is_not_a_tool_error():
    engine = Policy(two_tasks, fails=lambda prompt: EngineError("dead") if "given one task" in prompt else None)
    with pytest.raises(EngineError, match="dead"):
        await play(SubAgents([calculator]), engine)


async def test_the_limit_of_calls_is_that_of_the_part_that_the_row_names():
    parts = {"subagents": {"functions": [calculator], "max_calls": 3}, "user": {"turns": ["and?"] * 5}}
    sampler = Sampler(
        engine=Policy(two_tasks),  # type: ignore[arg-type]
        chat=CHAT,
        make_environment=partial(make_environment, "mixed", environments=parts),
        max_turns=6,
        seed=1,
    )
    rows = [{"question": "go", "environment": name} for name in parts]
    rollouts = await sampler.collect(rows, samples_per_prompt=1, sampling=sampling(), step=0)
    assert [len(rollout.calls) for rollout in rollouts] == [3, 6]


def test_limits_below_one_are_refused():
    with pytest.raises(ConfigError, match="max_calls=0"):
        SubAgents([calculator], max_calls=0)


async def test_an_aborted_call_of_a_hosted_conversation_fails_the_rollout():
    class Aborting(Policy):
        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
        ) -> EngineCall:
            engine = ScriptedEngine(lambda *_: (5,), finish=FinishReason.ABORT)
            if "given one task" in str(TOKENIZER.decode(list(prompt_ids))):
                return await engine.generate(prompt_ids, sampling)
            return await super().generate(prompt_ids, sampling)

    rollout = await play(SubAgents([calculator]), Aborting(two_tasks))
    assert rollout.status is RolloutStatus.FAILED
    assert "aborted" in (rollout.error or "")
