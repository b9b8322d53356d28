"""Routes of real engines: equal to those of transformers, through caches, preemption and syncs, and replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling, SyncedEngine
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall, Rollout
from lockstep.rollout.server.server_engine import GENERATE, ServerEngine
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import save_family
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.models import VOCAB_SIZE, perturb
from tests.fixtures.servers import KEY, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SLOW = (
    *("mixtral", "olmoe", "qwen2_moe", "glm4_moe", "granitemoe", "gpt_oss"),
    *("granite_hybrid", "qwen3_next", "lfm2_moe"),
)
FAMILY = "qwen3_moe"
REPLAYED = (FAMILY, *SLOW)
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(1, 500, 70).tolist()
OTHER = RNG.integers(1, 500, 9).tolist()
TOLERANCE = 2e-3


@contextmanager
def serving(family: str, directory: Path, **settings: Any) -> Iterator[tuple[EmbeddedEngine, Policy]]:
    path = save_family(family, directory / "model")
    with BackgroundLoop() as loop, forks_for_spawns():
        engine = EmbeddedEngine(
            EngineSettings(
                model=path,
                num_threads=1,
                return_routes=True,
                **{"max_model_len": 320, "kv_cache_gib": 0.0625, **settings},
            ),
            loop=loop,
            log_path=directory / "engine.log",
        )
        try:
            yield engine, Policy.from_pretrained(path)
        finally:
            loop.run(engine.close())


def sample(engine: SyncedEngine, prompts: Sequence[list[int]], *, length: int = 24) -> list[EngineCall]:
    async def all_of_them() -> list[EngineCall]:
        settings = Sampling(max_tokens=length, ignore_eos=True, with_routes=True)
        requests = [engine.generate(prompt, replace(settings, seed=seed)) for seed, prompt in enumerate(prompts)]
        return list(await asyncio.gather(*requests))

    return engine.loop.run(all_of_them(), timeout=120)


async def frozen_and_continued(engine: SyncedEngine, prompts: Sequence[list[int]]) -> list[EngineCall]:
    """Sample, and freeze the engine meanwhile, as a weight update does; it computes the requests again."""
    settings = Sampling(max_tokens=200, ignore_eos=True, with_routes=True, seed=1)
    requests, is_frozen = [], False
    for head_start_s in (0.3, 0.1, 0.05, 0.02):  # on a fast machine they may have ended
        requests = [asyncio.ensure_future(engine.generate(prompt, settings)) for prompt in prompts]
        await asyncio.sleep(head_start_s)
        await engine.pause("keep")
        if is_frozen := not any(request.done() for request in requests):
            break
        await engine.resume()
    assert is_frozen, "the requests ended before they were frozen"
    await engine.resume()
    return list(await asyncio.gather(*requests))


def assert_routed_as(policy: Policy, calls: Sequence[EngineCall]) -> None:
    """Compare the routes and logprobs of calls with the trainer's, token by token."""
    layers = sorted(policy.routing._routers)
    for call in calls:
        (row,) = rows_from_calls([call])
        with torch.no_grad():
            logp_T, _, own = policy(collate([replace(row, routes=None)], [0]), with_routes=True)
            replayed_T, _ = policy(collate([row], [0]))
        assert row.routes is not None
        assert row.routes.shape == (len(row) - 1, 2, 2)
        found, expected = np.sort(row.routes[:, layers], -1), np.sort(own[:-1, layers].numpy(), -1)
        assert np.array_equal(found, expected), f"{int((found != expected).any(-1).sum())} of {found[..., 0].size}"
        for one_T in (logp_T, replayed_T):
            assert (one_T - torch.tensor(call.sampled_logprobs)).abs().max() < TOLERANCE


@pytest.mark.v2
@pytest.mark.parametrize("family", [FAMILY, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_captured_routes_are_those_of_transformers_and_replaying_them_removes_flips(
    family: str, tmp_path: Path
) -> None:
    with serving(family, tmp_path) as (engine, policy):
        first = sample(engine, [PROMPT, PROMPT, OTHER, PROMPT[:40]])
        # Second turns: most of their prompts is in the prefix cache, up to a block of 32 tokens.
        second = sample(engine, [[*first[0].all_ids, 5, 6, 7], [*first[1].all_ids, *OTHER]])
        assert_routed_as(policy, [*first, *second])
        calls = sample(engine, [RNG.integers(1, 500, 100).tolist() for _ in range(16)], length=100)
    rows = [row for index, call in enumerate(calls) for row in rows_from_calls([call], rollout_id=index)]
    generator = torch.Generator().manual_seed(5)
    gates = [p for name, p in policy.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    assert gates
    for gate in gates:
        gate.data += 2e-4 * torch.randn(gate.shape, generator=generator)

    def k3(*, with_routes: bool) -> float:
        packed = collate(rows, range(len(rows)), with_routes=with_routes)
        with torch.no_grad():
            log_ratio_T = (policy(packed)[0] - packed.sampling_logprobs_T).double()
        return float((log_ratio_T.exp() - 1 - log_ratio_T).mean())

    own, replayed = k3(with_routes=False), k3(with_routes=True)
    assert replayed < 1e-5, f"k3 with replay: {replayed:.1e}"
    assert replayed < own / 10, f"k3 {own:.1e} without replay, {replayed:.1e} with it"


def test_routes_survive_preemption_a_sync_and_conversations(tmp_path: Path) -> None:
    # 2 KiB a token in two layers of keys and values: room for 512 tokens, of which five requests want 850.
    with serving(FAMILY, tmp_path, kv_cache_gib=512 * 512 / 2**30) as (engine, policy):
        assert_routed_as(policy, sample(engine, [RNG.integers(1, 500, 50).tolist() for _ in range(5)], length=120))
        assert "preempt" in (tmp_path / "engine.log").read_text().lower()
    with serving(FAMILY, tmp_path) as (engine, policy):
        assert_routed_as(policy, engine.loop.run(frozen_and_continued(engine, [PROMPT, OTHER]), timeout=120))
        before = sample(engine, [PROMPT])

        def canary(ids: list[int]) -> list[float]:
            logits = policy.causal_lm(torch.tensor([ids])).logits[0, :-1].float()
            return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

        sync = WeightSync(module=policy.model, engines=[engine], score_canary=canary, deadline_s=60)
        try:
            perturb(policy, seed=1)
            sync.push(1)
            after = sample(engine, [PROMPT])
        finally:
            sync.close()
        assert_routed_as(policy, after)
        assert before[0].routes is not None
        assert after[0].routes is not None
        assert not np.array_equal(before[0].routes.whole[:70], after[0].routes.whole[:70])
        turns = [after[0]]
        for _ in range(3):
            turns += sample(engine, [[*turns[-1].all_ids, 9, 8, 7]], length=10)
        rollout = Rollout(rollout_id=0, group_id=0, calls=tuple(turns))
        (row,) = rows_from_calls(rollout.calls)
        with torch.no_grad():
            *_, own = policy(collate([replace(row, routes=None)], [0]), with_routes=True)
        assert row.routes is not None
        assert np.array_equal(np.sort(row.routes, -1), np.sort(own[:-1].numpy(), -1))
        stored = sum(len(call.routes.own) for call in rollout.calls if call.routes is not None)
        assert stored == len(row) - 1, "tokens of later prompts are stored once"


@pytest.mark.slow
def test_a_server_returns_routes_over_both_of_its_routes(tmp_path: Path) -> None:
    path = save_family(FAMILY, tmp_path / "model")
    replays = {"correction.routing_replay": "engine"}
    with running(path, tmp_path, **replays) as (server,), BackgroundLoop() as loop:
        engine = ServerEngine(server.url, loop=loop, vocab_size=VOCAB_SIZE, api_key=KEY)
        try:
            assert engine.returns_routes
            policy = Policy.from_pretrained(path)
            assert len(loop.run(engine.score(PROMPT))) == len(PROMPT) - 1
            compact = sample(engine, [PROMPT, OTHER])
            assert_routed_as(policy, compact)
            engine._route = GENERATE
            assert_routed_as(policy, sample(engine, [PROMPT, OTHER]))
        finally:
            loop.run(engine.close())
