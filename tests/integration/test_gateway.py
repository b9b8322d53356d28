"""Tests of the gateway with a real engine and the real `openai` client, and of a training run on an agent."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from lockstep.integrations.gateway.server import Gateway
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall, FinishReason
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.saved_rollouts import read_rollouts
from tests.fixtures.agents import calculator_agent
from tests.fixtures.forked_python import forked_python
from tests.fixtures.models import sampled_logprobs, tiny_qwen3
from tests.fixtures.tokenizers import chat_tokenizer
from tests.integration.conftest import Served

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
USER = {"role": "user", "content": "compute 12*34-56"}
CHAT = Chat(chat_tokenizer("qwen3"))
SAMPLING = Sampling(max_tokens=16, stop_token_ids=CHAT.stop_token_ids)


@pytest.fixture
def gateway(served: Served) -> Iterator[Gateway]:
    gateway = Gateway(engine=served.engine, chat=CHAT, offered=[SAMPLING])
    served.loop.run(gateway.start())
    yield gateway
    served.loop.run(gateway.close())


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """Client whose requests are recorded under /s/test."""
    base_url = gateway.base_url.replace("/v1", "/s/test/v1")
    with openai.OpenAI(base_url=base_url, api_key=gateway.api_key, max_retries=0) as client:
        yield client


def recorded(gateway: Gateway) -> tuple[EngineCall, ...]:
    return gateway._named["test"].calls


def test_a_conversation_is_trained_as_it_was_sampled(served: Served, gateway: Gateway, client: openai.OpenAI):
    messages: list[Any] = [USER]
    for turn in range(4):
        answer = client.chat.completions.create(model="policy", messages=messages)
        message: Any = answer.choices[0].message
        if turn % 2:  # every other turn comes back without the fields that a harness may drop
            fields = message.model_dump()
            message = {
                key: fields[key] for key in ("role", "content", "tool_calls", "reasoning_content") if fields.get(key)
            }
        messages += [message, {"role": "user", "content": "go on <|im_end|>"}]
        assert answer.model_extra is not None
        assert answer.model_extra["prompt_kind"] == ("extended" if turn else "root")
    calls = recorded(gateway)
    (row,) = rows_from_calls(calls)
    assert row.num_trained == sum(len(call.sampled_ids) for call in calls) > 4
    for call in calls:
        assert served.mismatch(call) < 1e-4


def test_stripped_reasoning_branches_and_every_token_is_trained(gateway: Gateway, client: openai.OpenAI):
    messages: list[Any] = [USER]
    for _ in range(4):
        message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": (message.content or "")[:3]}, USER]  # summarized
    calls = recorded(gateway)
    rows = rows_from_calls(calls)
    assert len(rows) == 4
    assert sum(row.num_trained for row in rows) == sum(len(call.sampled_ids) for call in calls)


def test_several_choices_are_several_samples_with_their_own_evidence(served: Served, client: openai.OpenAI):
    answer = client.chat.completions.create(model="policy", messages=[USER], n=3, seed=7)
    again = client.chat.completions.create(model="policy", messages=[USER], n=3, seed=7)
    extras = [choice.message.model_extra or {} for choice in answer.choices]
    assert len({tuple(extra["generation_token_ids"]) for extra in extras}) == 3
    assert extras == [choice.message.model_extra or {} for choice in again.choices], "the same seed, the same samples"
    for extra in extras:
        prompt = (answer.model_extra or {})["prompt_token_ids"]
        expected = sampled_logprobs(served.model, tuple(prompt), tuple(extra["generation_token_ids"]))
        assert extra["generation_log_probs"] == pytest.approx(expected, abs=1e-4)


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI):
    whole = client.chat.completions.create(model="policy", messages=[USER], seed=3)
    text, extra = "", {}
    for chunk in client.chat.completions.create(model="policy", messages=[USER], seed=3, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        extra |= delta.model_extra or {}
    message = whole.choices[0].message
    assert text == message.content
    assert extra == message.model_extra


def test_a_stop_string_leaves_the_logprobs_of_the_kept_tokens_exact(
    served: Served, gateway: Gateway, client: openai.OpenAI
):
    whole = client.chat.completions.create(model="policy", messages=[USER], seed=3).choices[0].message
    text = CHAT.tokenizer.decode((whole.model_extra or {})["generation_token_ids"])
    stop = next(char for char in text[len(text) // 2 :] if char.isprintable() and char != "\ufffd")
    client.chat.completions.create(model="policy", messages=[USER], seed=3, stop=stop)
    before, cut = recorded(gateway)
    assert cut.sampled_ids == before.sampled_ids[: len(cut.sampled_ids)]
    assert cut.finish_reason is FinishReason.STOP
    assert served.mismatch(cut) < 1e-4


def test_deterministic_agents_give_the_same_rollouts_twice(served: Served):
    def collect() -> list[tuple[EngineCall, ...]]:
        sampler = Sampler(
            engine=served.engine,
            chat=CHAT,
            make_environment=partial(make_environment, "agent", agent=calculator_agent),
            max_turns=3,
            seed=1,
        )
        rollouts = served.loop.run(
            sampler.collect([{"question": USER["content"]}], samples_per_prompt=4, sampling=SAMPLING, step=0),
            timeout=60,
        )
        assert all(rollout.is_trainable for rollout in rollouts), [rollout.error for rollout in rollouts]
        return [rollout.calls for rollout in rollouts]

    first = collect()
    assert len({calls[0].sampled_ids for calls in first}) > 1
    assert [[call.sampled_ids for call in calls] for calls in collect()] == [
        [call.sampled_ids for call in calls] for calls in first
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "agent",
    [
        "calculator_agent",
        pytest.param("responses_agent", marks=pytest.mark.slow),
        pytest.param("messages_agent", marks=pytest.mark.slow),
    ],
)
def test_a_run_trains_on_an_agent_that_knows_only_a_url_and_a_key(tmp_path: Path, agent: str):
    model = tmp_path / "model"
    tiny_qwen3(tied=True).save_pretrained(model)
    CHAT.tokenizer.save_pretrained(model)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"compute {i}+1", "answer": str(i + 1)}) + "\n" for i in range(8))
    )
    (tmp_path / "reward.py").write_text("def many_tokens(rollout): return float(rollout.num_sampled % 7)\n")
    settings = {
        "environment": "agent",
        "environment.settings.agent": f"{ROOT}/tests/fixtures/agents.py:{agent}",
        "environment.max_turns": "3",
        "model.path": model,
        "data.path": tmp_path / "rows.jsonl",
        "data.heldout_path": "null",
        "reward.functions": f"[{tmp_path}/reward.py:many_tokens]",
        "updates": "2",
        "rollout.prompts_per_step": "2",
        "rollout.samples_per_prompt": "4",
        "rollout.max_tokens_per_turn": "16",
        "rollout.kv_cache_gib": "0.0625",
        "run_root": tmp_path / "runs",
        "run_name": "agent",
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [forked_python(), "scripts/train.py", *(f"{key}={value}" for key, value in settings.items())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "agent"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) >= 2
    assert all(line["rollout/token_match_rate"] == 1.0 for line in metrics if "rollout/token_match_rate" in line)
    assert any("rollout/token_match_rate" in line for line in metrics)
    for path in sorted(run.glob("rollouts/step-*.jsonl")):
        rollouts = list(read_rollouts(path))
        assert len(rollouts) == 8
        for rollout in rollouts:
            assert rollout.is_trainable, rollout.error
            assert sum(row.num_trained for row in rows_from_calls(rollout.calls)) == rollout.num_sampled
