"""Requirements of an embedded engine. The engine itself: tests/integration/test_engine.py."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import RetryableRequestError, VLLMValidationError

from lockstep.rollout.engine import embedded
from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.arguments import CPU_BLOCK_TOKENS, EXTENSION, engine_arguments
from lockstep.rollout.engine.embedded import EmbeddedEngine, _check_compiler
from lockstep.rollout.engine.engine_answers import UNUSABLE_PREFIX
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import ConfigError, EngineError, RequestError
from lockstep.rollout.system.background_loop import BackgroundLoop
from tests.fixtures.families import FAMILIES
from tests.fixtures.models import save_tiny_model


def arguments(path: Path, *, is_cpu: bool, dtype: str = "bfloat16", max_model_len: int | None = 9000) -> dict[str, Any]:
    return engine_arguments(EngineSettings(model=path, dtype=dtype, max_model_len=max_model_len), is_cpu=is_cpu)


def test_settings_for_cpus_alone_are_not_given_to_gpus(tmp_path: Path) -> None:
    on_both = {"worker_extension_cls": EXTENSION}
    on_cpu = arguments(tmp_path, is_cpu=True)
    assert on_cpu == on_both | {
        "max_num_batched_tokens": 9000, "enable_chunked_prefill": False, "block_size": CPU_BLOCK_TOKENS,
    }  # fmt: skip
    on_gpu = arguments(tmp_path, is_cpu=False)
    assert on_gpu == on_both | {"max_num_batched_tokens": 8192, "hf_overrides": {"head_dtype": "float32"}}
    assert "hf_overrides" not in arguments(tmp_path, is_cpu=False, dtype="float32")
    assert {*on_cpu, *on_gpu} <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_recurrent_layers_have_their_own_arguments(tmp_path: Path) -> None:
    for family in ("falcon_h1", "qwen3_next", "lfm2"):
        FAMILIES[family]().save_pretrained(tmp_path)
        assert arguments(tmp_path, is_cpu=True)["enable_prefix_caching"] is False
    assert arguments(tmp_path, is_cpu=False)["hf_overrides"] == {
        "head_dtype": "float32",
        "conv_dim": 64,
        "block_dim": 64,
    }
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    assert "enable_prefix_caching" not in arguments(tmp_path, is_cpu=True)


def test_qwen3_5_without_torchvision_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Qwen3_5Config(text_config=FAMILIES["qwen3_5"]().to_dict()).save_pretrained(tmp_path)
    monkeypatch.setattr("lockstep.rollout.engine.arguments.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model type qwen3_5,.*pip install torchvision.*whl/cpu"):
        arguments(tmp_path, is_cpu=True)
    monkeypatch.setattr("lockstep.rollout.engine.arguments.find_spec", lambda name: object())
    assert arguments(tmp_path, is_cpu=True)["limit_mm_per_prompt"] == {"image": 0, "video": 0}


def test_an_olmoe_that_vllm_computes_in_another_way_is_refused(tmp_path: Path) -> None:
    config = FAMILIES["olmoe"]()
    config.save_pretrained(tmp_path)
    arguments(tmp_path, is_cpu=True)
    config.norm_topk_prob = True
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"norm_topk_prob=true.*OLMoE.*norm_topk_prob=false"):
        arguments(tmp_path, is_cpu=True)


@pytest.mark.parametrize("is_tuned", [True, False])
def test_llama_4_scales_queries_as_its_config_says(is_tuned: bool, tmp_path: Path) -> None:
    config = FAMILIES["llama4"]()
    config.attn_temperature_tuning = is_tuned
    config.save_pretrained(tmp_path)
    assert arguments(tmp_path, is_cpu=True)["override_generation_config"] == {"attn_temperature_tuning": is_tuned}
    config.attention_chunk_size = 48
    config.save_pretrained(tmp_path)
    assert "override_generation_config" in arguments(tmp_path, is_cpu=False)
    with pytest.raises(ConfigError, match=r"chunks of 48 tokens.* multiple of 32 on a CPU; set attention_chunk_size"):
        arguments(tmp_path, is_cpu=True)


def test_a_float32_head_is_what_vllm_reads_from_the_setting(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tied=True)
    overrides = arguments(tmp_path, is_cpu=False)["hf_overrides"]
    config = ModelConfig(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, hf_overrides=overrides)
    assert config.head_dtype == torch.float32
    assert ModelConfig(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True).head_dtype == torch.bfloat16


def test_a_compiled_engine_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "clang++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    _check_compiler()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"g\+\+ and clang\+\+ cannot be found.*set rollout\.compile_engine=false"):
        _check_compiler()
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(ConfigError, match="icpx cannot be found"):
        _check_compiler()


class RefusesWhilePaused:
    """Stand-in for vLLM 0.33, which refuses requests from a pause that drains or aborts until it resumes."""

    errored = False
    output_handler = None
    model_config = SimpleNamespace(max_model_len=64, dtype=torch.float32, get_vocab_size=lambda: 512)

    def __init__(self) -> None:
        self.refuses = self.is_busy = False
        self.pauses: list[tuple[str, str]] = []
        """Calls that pause, with their modes."""
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: self.is_busy)
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.pause_scheduler)
        self.answered = self.refused = 0
        self.slept: list[int | str] = []
        """Levels of sleep, and labels of the weights."""

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.pauses.append(("engine", mode))
        self.refuses = mode != "keep"

    async def pause_scheduler(self, *, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        self.pauses.append(("scheduler", mode))
        self.refuses = mode != "keep"

    async def resume_generation(self) -> None:
        self.refuses = False

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[str]:
        if self.refuses:
            self.refused += 1
            raise RetryableRequestError("Generation is paused. Please retry after it resumes.")
        self.answered += 1
        yield "answer"

    def shutdown(self, timeout: float) -> None:
        pass

    async def sleep(self, level: int) -> None:
        self.slept.append(level)

    async def update_weight_version(self, label: str) -> None:
        self.slept.append(label)


class Paused(EmbeddedEngine):
    async def _build(self) -> Any:
        return RefusesWhilePaused()


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_requests_wait_for_the_end_of_a_pause_that_refuses_them(tmp_path: Path, mode: str) -> None:
    async def pause_and_request() -> asyncio.Task[Any]:
        await engine.pause(mode)
        waiting = asyncio.ensure_future(engine._request([5], {}))
        await asyncio.sleep(0.05)
        return waiting

    with BackgroundLoop() as loop:
        engine = Paused(EngineSettings(model=str(tmp_path)), loop=loop, log_path=tmp_path / "engine.log")
        waiting = loop.run(pause_and_request())
        stand_in: Any = engine.llm
        assert stand_in.answered == (1 if mode == "keep" else 0)
        loop.run(engine.resume())
        assert loop.run(asyncio.wait_for(waiting, 10)) == "answer"
        assert (stand_in.answered, stand_in.refused) == (1, 0)
        loop.run(engine.close())


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_an_engine_waits_for_the_last_outputs_only_if_requests_are_in_flight(tmp_path: Path, mode: str) -> None:
    with BackgroundLoop() as loop:
        engine = Paused(EngineSettings(model=str(tmp_path)), loop=loop, log_path=tmp_path / "engine.log")
        stand_in: Any = engine.llm
        loop.run(engine.pause(mode))
        assert stand_in.pauses == [("scheduler", mode)]
        stand_in.is_busy, stand_in.pauses = True, []
        loop.run(engine.pause(mode))
        assert stand_in.pauses == [("engine", "keep")] * (mode == "abort") + [("engine", mode)]
        loop.run(engine.close())


def test_a_request_that_waits_for_a_pause_ends_with_the_engine(tmp_path: Path) -> None:
    async def close_while_one_waits() -> None:
        await engine.pause("wait")
        waiting = asyncio.ensure_future(engine.generate([5], Sampling(max_tokens=4)))
        await asyncio.sleep(0.05)
        await engine.close()
        await asyncio.wait_for(waiting, 10)

    with BackgroundLoop() as loop:
        engine = Paused(EngineSettings(model=str(tmp_path)), loop=loop, log_path=tmp_path / "engine.log")
        with pytest.raises(EngineError, match="the engine was closed"):
            loop.run(close_while_one_waits())


def test_an_engine_that_died_while_paused_answers_again_after_its_restart(tmp_path: Path) -> None:
    with BackgroundLoop() as loop:
        engine = Paused(EngineSettings(model=str(tmp_path)), loop=loop, log_path=tmp_path / "engine.log")
        loop.run(engine.pause("wait"))
        stand_in: Any = engine.llm
        stand_in.errored = True
        assert engine.restart_if_dead()
        assert loop.run(asyncio.wait_for(engine._request([5], {}), 10)) == "answer"
        loop.run(engine.close())


@pytest.mark.parametrize(
    ("adapters", "expected"), [(None, [f"{UNUSABLE_PREFIX}asleep", 2, 1]), (AdapterSettings(max_rank=8), [1, 1])]
)
def test_an_engine_whose_weights_no_sync_brings_back_keeps_them_asleep(
    tmp_path: Path, adapters: AdapterSettings | None, expected: list[int | str]
) -> None:
    with BackgroundLoop() as loop:
        engine = Paused(
            EngineSettings(model=str(tmp_path), adapters=adapters), loop=loop, log_path=tmp_path / "engine.log"
        )
        for level in (2, 1):
            loop.run(engine.sleep(level))
        stand_in: Any = engine.llm
        assert stand_in.slept == expected
        loop.run(engine.close())


class Holds(RefusesWhilePaused):
    """Stand-in for vLLM that raises its `failures`, one per request, and holds all other requests and control calls."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[Exception] = []
        self.answers = asyncio.Event()
        self.aborted: list[str] = []

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[str]:
        self.answered += 1
        if self.failures:
            raise self.failures.pop(0)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        yield "answer"

    async def get_weight_version(self) -> str:
        await self.answers.wait()
        return "default"


class Held(EmbeddedEngine):
    llm: Any

    async def _build(self) -> Any:
        return Holds()


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(embedded, "WATCH_S", 0.01)
    with BackgroundLoop() as loop:
        engine = Held(EngineSettings(model=str(tmp_path)), loop=loop, log_path=tmp_path / "engine.log")
        yield engine
        loop.run(engine.close())


async def begin(engine: Held, number: int = 1) -> list[asyncio.Task[Any]]:
    """Return requests that have reached vLLM."""
    reached = engine.llm.answered + number
    tasks = [asyncio.create_task(engine._request([5], {})) for _ in range(number)]
    while engine.llm.answered < reached:
        await asyncio.sleep(0)
    return tasks


async def outcomes(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Return results and errors, which must come, and see that they leave no task behind."""
    async with asyncio.timeout(10):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)
    return ended


def test_one_task_watches_all_calls_and_ends_them_when_the_engine_dies(held: Held) -> None:
    async def die() -> list[Any]:
        tasks = await begin(held, 20)
        tasks.append(asyncio.create_task(held.weight_version()))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        assert len(asyncio.all_tasks()) == len(tasks) + 2, "the calls, this one, and the watcher"
        held.llm.errored = True
        return await outcomes(tasks)

    errors = held.loop.run(die())
    assert {type(error) for error in errors} == {EngineError}
    assert all(str(error).startswith("cannot sample: the engine is dead (") for error in errors[:-1])
    assert str(errors[-1]).startswith("cannot read the weight version: the engine is dead")
    assert len(held.llm.aborted) == 20
    assert held.restart_if_dead()

    async def live() -> list[Any]:
        tasks = await begin(held)
        held.llm.answers.set()
        return await outcomes(tasks)

    assert held.loop.run(live()) == ["answer"]


def test_a_deadline_ends_and_aborts_one_request_and_leaves_the_others(held: Held) -> None:
    async def wait() -> list[Any]:
        held._request_timeout_s = 60
        (patient,) = await begin(held)
        held._request_timeout_s = 0.05
        (hasty,) = await begin(held)
        await asyncio.wait([hasty], timeout=10)
        assert not patient.done()
        assert held.llm.aborted == ["lockstep-1"]
        held.llm.answers.set()
        return await outcomes([patient, hasty])

    answer, error = held.loop.run(wait())
    assert answer == "answer"
    assert type(error) is EngineError
    assert "cannot sample: no answer within 0.05 s" in str(error)
    assert "raise rollout.request_timeout_s" in str(error)
    assert held.llm.answered == 2, "a request that hangs has one attempt"


def test_a_canceled_request_is_aborted_and_a_closed_engine_ends_its_calls(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WATCH_S", 60)

    async def end() -> list[Any]:
        canceled, closed = await begin(held, 2)
        control = asyncio.create_task(held.weight_version())
        await asyncio.sleep(0)
        canceled.cancel()
        await asyncio.wait([canceled])
        llm = held.llm
        assert llm.aborted == ["lockstep-0"]
        await held.close()
        ended = await outcomes([canceled, closed, control])
        assert llm.aborted == ["lockstep-0", "lockstep-1"]
        return ended

    canceled, *closed = held.loop.run(end())
    assert isinstance(canceled, asyncio.CancelledError)
    assert [(type(error), str(error)) for error in closed] == [(EngineError, "the engine was closed")] * 2


def test_only_failures_that_may_pass_are_retried_after_growing_pauses(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def shortened(delay: float) -> None:
        if delay > embedded.WATCH_S:
            pauses.append(delay)
        await sleep(min(delay, embedded.WATCH_S))

    monkeypatch.setattr(embedded.asyncio, "sleep", shortened)

    def attempts(*failures: Exception) -> int:
        pauses.clear()
        held.llm.answered, held.llm.failures = 0, list(failures)
        held.llm.answers.set()
        try:
            assert held.loop.run(held._request([5], {}), timeout=10) == "answer"
        finally:
            assert len(pauses) == held.llm.answered - 1
        return held.llm.answered

    passing = [RetryableRequestError(f"failure {number}") for number in range(3)]
    assert attempts(*passing[:2]) == 3
    assert 0.1 <= pauses[0] <= 0.2 <= pauses[1] <= 0.3
    with pytest.raises(RequestError, match="cannot sample: failure 2\n"):
        attempts(*passing)
    assert len(pauses) == 2
    for failure, expected in ((VLLMValidationError("bad"), EngineError), (KeyError("ours"), KeyError)):
        with pytest.raises(expected) as raised:
            attempts(failure)
        assert raised.type is expected
        assert pauses == []
