"""The embedded engine with a real vLLM: exact tokens and logprobs, and no request can kill it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.rollout.records import EngineCall, FinishReason, VersionSpan
from lockstep.rollout.system.background_loop import BackgroundLoop
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.models import EOS_ID, VOCAB_SIZE, sampled_logprobs, tiny_qwen3
from tests.integration.conftest import Served

pytestmark = [pytest.mark.engine, pytest.mark.v2]

PROMPT = (5, 99, 300, 12)


@contextmanager
def started(model: Qwen3ForCausalLM, directory: Path, **settings: Any) -> Iterator[EmbeddedEngine]:
    """Start an engine of its own with a model. settings: of `EmbeddedEngine`."""
    model.save_pretrained(directory / "model")
    with BackgroundLoop() as loop, forks_for_spawns():
        engine = EmbeddedEngine(
            EngineSettings(model=directory / "model", kv_cache_gib=0.0625, num_threads=1, **settings),
            loop=loop,
            log_path=directory / "engine.log",
        )
        try:
            yield engine
        finally:
            loop.run(engine.close())


def test_the_runner_and_its_scheduling_are_those_that_this_run_asks_for(served: Served) -> None:
    is_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # `make test-v2`
    assert ("Using V2 Model Runner" in served.engine.log_path.read_text()) == is_v2
    assert bool(served.engine.llm.vllm_config.scheduler_config.async_scheduling) == is_v2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_the_trainer(served: Served, temperature: float) -> None:
    call = served.generate(PROMPT, max_tokens=64, temperature=temperature)

    assert len(call.sampled_ids) == 64
    assert served.mismatch(call, temperature=temperature) < 1e-4


@pytest.mark.v1("the interpreter takes minutes for kernels over 152 k entries")
def test_logprobs_over_a_large_vocabulary_have_no_common_error(tmp_path: Path) -> None:
    """With torch's own log_softmax on a CPU, all logprobs of this model are 6e-6 to 1.3e-5 too high."""
    model = tiny_qwen3(tied=True, vocab_size=151_936)
    with torch.no_grad():
        model.model.norm.weight.fill_(4)  # logits with a standard deviation of 4
    with started(model, tmp_path, max_model_len=80) as engine:

        async def sample() -> tuple[list[EngineCall], list[float]]:
            settings = [Sampling(max_tokens=64, ignore_eos=True, seed=seed) for seed in range(8)]
            calls = await asyncio.gather(*(engine.generate(PROMPT, sampling) for sampling in settings))
            return calls, await engine.score([*PROMPT, *calls[0].sampled_ids])

        calls, scores = engine.loop.run(sample(), timeout=120)
    differences = []
    for call in calls:
        ids = torch.tensor([*call.prompt_ids, *call.sampled_ids])
        with torch.no_grad():
            exact = model(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        differences.append(torch.tensor(call.sampled_logprobs).double() - exact[len(PROMPT) - 1 :])
        if call is calls[0]:
            scored = torch.tensor(scores).double() - exact
    assert torch.cat(differences).mean().abs() < 1e-6
    assert scored.mean().abs() < 2e-6, "68 tokens, of which each has rounded logits"


def test_scores_are_those_of_the_trainer_for_every_token_but_the_first(served: Served) -> None:
    ids = list(range(40, 240))
    scores = served.loop.run(served.engine.score(ids))

    assert scores == pytest.approx(served.score(ids), abs=1e-4)


def test_most_probable_tokens_are_those_of_the_trainer(served: Served) -> None:
    ids = [*PROMPT, 7, 8, 9, 400, 11]
    found = served.loop.run(served.engine.score_top(ids, 5))
    with torch.no_grad():
        expected = served.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    top = expected.topk(5)
    assert found.logprobs.tolist() == pytest.approx(
        sampled_logprobs(served.model, tuple(ids[:1]), tuple(ids[1:])), abs=1e-4
    )
    assert found.top_ids.tolist() == top.indices.tolist()
    assert found.top_logprobs == pytest.approx(top.values.numpy(), abs=1e-4)
    assert found.version == served.version


def test_a_seeded_request_is_the_same_alone_and_in_a_busy_batch(served: Served) -> None:
    alone = served.generate(PROMPT, seed=7)

    async def busy() -> list:
        sampling = [Sampling(max_tokens=32, ignore_eos=True, seed=seed) for seed in range(24)]
        prompts = [PROMPT if seed == 7 else (seed, *PROMPT, *range(seed)) for seed in range(24)]
        return await asyncio.gather(*map(served.engine.generate, prompts, sampling))

    crowd = served.loop.run(busy(), timeout=120)
    assert crowd[7].sampled_ids == alone.sampled_ids
    assert crowd[7].sampled_logprobs == pytest.approx(alone.sampled_logprobs, abs=1e-4)
    assert len({call.sampled_ids for call in crowd}) == 24


def test_requests_with_different_numbers_of_logprobs_share_a_batch(served: Served) -> None:
    """vLLM's arrays of a step are as wide as its request with the most logprobs, so a request's steps differ."""

    async def shared() -> list:
        long = served.engine.generate(PROMPT, Sampling(max_tokens=96, ignore_eos=True, seed=3))
        truncated = Sampling(max_tokens=8, ignore_eos=True, seed=4, top_k=20)
        started = asyncio.create_task(long)
        calls = [await served.engine.generate((*PROMPT, token), truncated) for token in range(3)]
        return [await started, *calls]

    long, *truncated = served.loop.run(shared(), timeout=120)
    assert len(long.sampled_ids) == 96
    assert served.mismatch(long) < 1e-4
    assert long.support is None
    for call in truncated:
        assert call.support is not None
        assert len(call.sampled_ids) == 8


@pytest.mark.parametrize("bad_id", [VOCAB_SIZE, -1, 2**40])
def test_an_id_outside_the_vocabulary_is_refused_and_the_engine_lives(served: Served, bad_id: int) -> None:
    with pytest.raises(EngineError, match=rf"token id {bad_id} is outside .* vocabulary of {VOCAB_SIZE}"):
        served.generate((5, bad_id, 6))
    with pytest.raises(EngineError, match="outside"):
        served.loop.run(served.engine.score([5, bad_id]))

    assert served.generate(PROMPT).sampled_ids


def test_a_long_prompt_with_a_seed_does_not_kill_the_engine(served: Served) -> None:
    async def many() -> list:
        sampling = [Sampling(max_tokens=8, ignore_eos=True, seed=seed) for seed in range(60)]
        prompts = [tuple((seed + i) % VOCAB_SIZE for i in range(300)) for seed in range(60)]
        return await asyncio.gather(*map(served.engine.generate, prompts, sampling))

    calls = served.loop.run(many(), timeout=200)  # 18,000 prompt tokens: more than one step takes
    assert all(len(call.sampled_ids) == 8 for call in calls)


def test_a_stop_token_is_kept_with_its_logprob(served: Served) -> None:
    free = served.generate(PROMPT)
    stop_id = free.sampled_ids[5]
    call = served.generate(PROMPT, stop_token_ids=(stop_id,))

    end = free.sampled_ids.index(stop_id) + 1
    assert call.sampled_ids == free.sampled_ids[:end]
    assert call.sampled_logprobs == pytest.approx(free.sampled_logprobs[:end], abs=1e-4)
    assert call.finish_reason is FinishReason.STOP


def test_the_end_of_sequence_token_stops_unless_it_is_ignored(served: Served) -> None:
    ended = [served.generate(PROMPT, seed=seed, max_tokens=300, ignore_eos=False) for seed in range(8)]
    stopped = [call for call in ended if call.finish_reason is FinishReason.STOP]

    assert stopped, "with 512 ids, some of 8 completions of 300 tokens end"
    assert all(call.sampled_ids.index(EOS_ID) == len(call.sampled_ids) - 1 for call in stopped)
    assert all(EOS_ID not in call.sampled_ids for call in ended if call not in stopped)


def test_max_tokens_is_cut_to_what_the_context_leaves(served: Served) -> None:
    prompt = tuple(range(served.engine.max_model_len - 3))
    call = served.generate(prompt, max_tokens=1000)

    assert len(call.sampled_ids) == 3
    assert call.finish_reason is FinishReason.LENGTH


def test_a_longer_context_scores_rows_that_fill_the_limit_of_sampling(tmp_path: Path) -> None:
    """vLLM samples a token after those that it scores, so a row of `max_model_len` tokens needs one more."""
    model = tiny_qwen3(tied=True)
    with started(model, tmp_path, max_model_len=32, context=33) as engine:
        run = engine.loop.run
        call = run(engine.generate(PROMPT, Sampling(max_tokens=1000, ignore_eos=True)))
        row = call.all_ids
        assert len(row) == engine.max_model_len == 32
        with pytest.raises(EngineError, match="leaves no room"):
            run(engine.generate(row, Sampling(max_tokens=1)))
        top = run(engine.score_top(row, 3))
        assert run(engine.score(row)) == pytest.approx(top.logprobs.tolist(), abs=1e-6)
        with pytest.raises(EngineError, match="leaves no room"):
            run(engine.score_top((*row, 5), 3))
    exact = sampled_logprobs(model, row[:1], row[1:])
    assert top.logprobs == pytest.approx(exact, abs=1e-4)


def test_a_prompt_that_leaves_no_room_is_refused(served: Served) -> None:
    with pytest.raises(EngineError, match="leaves no room"):
        served.generate(tuple(range(served.engine.max_model_len)))
    with pytest.raises(EngineError, match="empty"):
        served.generate(())


def test_tokens_carry_the_version_of_the_weights(served: Served) -> None:
    call = served.generate(PROMPT)

    assert call.version_spans == (VersionSpan(version=served.version, start=0, end=len(call.sampled_ids)),)


def test_truncated_sampling_is_refused_because_its_logprobs_are_over_another_support(served: Served) -> None:
    for truncation in ({"top_p": 0.9}, {"top_k": 21}, {"min_p": 0.1}):
        with pytest.raises(EngineError, match=r"rollout\.top_k"):
            served.generate(PROMPT, **truncation)


def test_greedy_sampling_takes_the_most_likely_token(served: Served) -> None:
    first, second = (served.generate(PROMPT, temperature=0.0, seed=seed) for seed in (1, 2))

    assert first.sampled_ids == second.sampled_ids


def test_an_aborting_pause_returns_the_partial_completion(served: Served) -> None:
    async def abort() -> object:
        running = asyncio.ensure_future(
            served.engine.generate(PROMPT, Sampling(max_tokens=300, ignore_eos=True, seed=0))
        )
        await asyncio.sleep(0.1)
        await served.engine.pause("abort")
        call = await running
        await served.engine.resume()
        return call

    call = served.loop.run(abort())
    assert call.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="wait, keep, abort"):
        served.loop.run(served.engine.pause("sleep"))


def test_a_request_past_its_deadline_is_an_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.loop.run(served.engine.pause("keep"))
    monkeypatch.setattr(served.engine, "_request_timeout_s", 1.0)
    try:
        with pytest.raises(EngineError, match=r"no answer within 1 s.*request_timeout_s"):
            served.generate(PROMPT)
    finally:
        served.loop.run(served.engine.resume())


def test_vllm_writes_to_its_log_and_not_to_the_console(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    served.generate(PROMPT)

    assert "vllm" in served.engine.log_path.read_text()
    assert capfd.readouterr() == ("", "")
