"""Every family of models in engine, training and two weight syncs: the trainer scores the engine's logprobs.

Each starts an engine, so all are for `make test-slow`. Tests without an engine (packed rows, gradients, names of sent
weights) are in tests/unit/trainer/model/test_model_families.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.families import FAMILIES as LISTED
from lockstep.trainer.model.policy import Policy
from tests.fixtures.adapted import perturb_adapters
from tests.fixtures.families import FAMILIES, WINDOW, save_family
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.models import perturb

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
"""Bound of log π in nats, in float32."""
CACHED = tuple(range(40, 120))
"""A prompt of several blocks of the engine's cache, whose second sample reads its prefix from there."""
PROMPTS = (*(tuple(range(3, 3 + length)) for length in (2 * WINDOW, 5, WINDOW + 1)), CACHED, CACHED)

SENDING = [
    name
    for name, make in FAMILIES.items()
    if any(make().model_type in one.model_types for one in LISTED if not one.merges_adapters)
]


def pack(calls: list[EngineCall]) -> PackedBatch:
    rows = [row for index, call in enumerate(calls) for row in rows_from_calls([call], rollout_id=index)]
    return collate(rows, range(len(rows)))


def scored(policy: Policy, calls: list[EngineCall]) -> torch.Tensor:
    return policy(pack(calls), with_entropy=False)[0]


@contextmanager
def engine_of(path: Path, directory: Path, **settings: Any) -> Iterator[EmbeddedEngine]:
    with BackgroundLoop() as loop, forks_for_spawns():
        engine = EmbeddedEngine(
            EngineSettings(model=path, **{"max_model_len": 320, "kv_cache_gib": 0.0625, "num_threads": 1, **settings}),
            loop=loop,
            log_path=directory / "engine.log",
        )
        try:
            yield engine
        finally:
            loop.run(engine.close())


def sample(engine: EmbeddedEngine) -> list[EngineCall]:
    settings = Sampling(max_tokens=2 * WINDOW, ignore_eos=True, seed=0)
    return [engine.loop.run(engine.generate(prompt, settings), timeout=120) for prompt in PROMPTS]


def mismatch(policy: Policy, calls: list[EngineCall]) -> float:
    sampled = torch.tensor([logprob for call in calls for logprob in call.sampled_logprobs])
    with torch.no_grad():
        return (scored(policy, calls) - sampled).abs().max().item()


@contextmanager
def synced(policy: Policy, engine: EmbeddedEngine) -> Iterator[WeightSync]:
    def canary(ids: list[int]) -> list[float]:
        logits = policy.causal_lm(torch.tensor([ids])).logits[0, :-1].float()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    sync = WeightSync(module=policy.model, engines=[engine], score_canary=canary, deadline_s=60)
    try:
        yield sync
    finally:
        sync.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_trains_and_syncs(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path / "model")
    with engine_of(path, tmp_path) as engine:
        policy = Policy.from_pretrained(path)
        calls = sample(engine)
        assert mismatch(policy, calls) < TOLERANCE, "engine and trainer load different models"

        scored(policy, calls).sum().backward()
        without = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not without, "parameters without a finite gradient"

        with synced(policy, engine) as sync:
            for version in (1, 2):
                perturb(policy, seed=version)
                assert mismatch(policy, calls) > 0.1, "the perturbation is too small for this test to mean anything"
                assert sync.push(version).canary_abs_diff < TOLERANCE
                calls = sample(engine)
                assert mismatch(policy, calls) < TOLERANCE, f"the engine does not have the weights of update {version}"


@pytest.mark.parametrize("family", SENDING)
def test_a_family_samples_with_adapters(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path / "model")
    with engine_of(path, tmp_path, adapters=AdapterSettings(max_rank=4)) as engine:
        policy = Policy.from_pretrained(path, lora=LoraConfig(rank=4, alpha=8))
        calls = sample(engine)
        with synced(policy, engine) as sync:
            for version in (1, 2):
                perturb_adapters(policy, seed=version)
                assert mismatch(policy, calls) > 0.1, "the perturbation is too small for this test to mean anything"
                assert sync.push(version).canary_abs_diff < TOLERANCE
                calls = sample(engine)
                assert mismatch(policy, calls) < TOLERANCE, f"the engine does not have the adapter of update {version}"
