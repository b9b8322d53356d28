"""Real engines for the whole session, because starting one takes seconds and using one milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.records import EngineCall
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import SyncReport, WeightSync
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.forked_servers import ForkedServers
from tests.fixtures.models import sampled_logprobs, save_tiny_model, tiny_qwen3
from tests.fixtures.remote import save_model

CORE = {
    "test_default_run.py",
    "test_gateway.py",
    "test_golden_runs.py",
    "test_gradients.py",
    "test_one_step.py",
    "test_sync.py",
    "test_token_exactness.py",
    "test_zero3_sync.py",
}
"""Files of this folder that `make test` runs: tokens, gradients, weights and one whole run. Others are `long`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name not in CORE:
            item.add_marker(pytest.mark.long)


@dataclass
class Served:
    """An engine and the Hugging Face model with the same weights, which tests train."""

    loop: BackgroundLoop
    engine: EmbeddedEngine
    model: Qwen3ForCausalLM
    sync: WeightSync
    version: int = 0

    def generate(self, prompt_ids: tuple[int, ...], **sampling: object) -> EngineCall:
        settings = Sampling(**({"max_tokens": 32, "ignore_eos": True, "seed": 0} | sampling))  # type: ignore[arg-type]
        return self.loop.run(self.engine.generate(prompt_ids, settings), timeout=120)

    def score(self, ids: list[int]) -> list[float]:
        """Return the model's logprobs of ids[1:], as the trainer scores them."""
        return sampled_logprobs(self.model, tuple(ids[:1]), tuple(ids[1:]))

    def mismatch(self, call: EngineCall, *, temperature: float = 1.0) -> float:
        """Return the largest difference between the logprobs of engine and model."""
        expected = sampled_logprobs(self.model, call.prompt_ids, call.sampled_ids, temperature=temperature)
        return max(abs(a - b) for a, b in zip(call.sampled_logprobs, expected, strict=True))

    def push(self) -> SyncReport:
        self.version += 1
        return self.sync.push(self.version)


def serve(directory: Path, *, tied: bool, **settings: Any) -> Iterator[Served]:
    """Start an engine and a sync with its model. settings: further ones of `EmbeddedEngine`."""
    with BackgroundLoop() as loop:
        with forks_for_spawns():
            engine = EmbeddedEngine(
                EngineSettings(
                    model=save_tiny_model(directory / "model", tied=tied),
                    max_model_len=320,
                    kv_cache_gib=0.0625,
                    num_threads=1,
                    **settings,
                ),
                loop=loop,
                log_path=directory / "engine.log",
            )
        model = tiny_qwen3(tied=tied)
        sync = WeightSync(
            module=model,
            engines=[engine],
            score_canary=lambda ids: sampled_logprobs(model, tuple(ids[:1]), tuple(ids[1:])),
            deadline_s=60,
        )
        yield Served(loop=loop, engine=engine, model=model, sync=sync)
        sync.close()
        loop.run(engine.close())


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine with tied embeddings, the harder case for weight sync."""
    yield from serve(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def served_untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def forked_servers(tmp_path_factory: pytest.TempPathFactory) -> ForkedServers:
    """Servers of the model of `tests.fixtures.remote` that are ready in seconds."""
    directory = tmp_path_factory.mktemp("servers")
    return ForkedServers(save_model(directory / "model"), directory)
