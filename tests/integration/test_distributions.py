"""Whole distributions of a real engine and the trainer: equal up to rounding, and faults that sampled tokens hide."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import SyncError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import CANARY_THRESHOLD, SMALLEST_MEDIAN, CanarySettings, canary_ids
from lockstep.rollout.weights.sync import WeightSync
from lockstep.rollout.weights.whole.distributions import WholeRow
from lockstep.rollout.weights.whole.heard_logits import hear
from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.head.fused_head import FusedHead
from lockstep.trainer.model.head.whole_head import whole_scores
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.rounding import rounding_errors, rounding_of
from tests.fixtures.adapted import perturb_adapters
from tests.fixtures.families import save_family
from tests.fixtures.forked_python import forks_for_spawns

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

FAMILY = "llama3"
"""With a head of its own."""
VOCAB = 512
TOKEN = 300
assert TOKEN not in canary_ids(VOCAB)

Side = tuple[Policy, EmbeddedEngine, torch.dtype]


@contextmanager
def both(family: str, dtype: str, directory: Path, **adapters: object) -> Iterator[Side]:
    path = save_family(family, directory / "model")
    settings = EngineSettings(
        model=path, dtype=dtype, max_model_len=320, kv_cache_gib=0.0625, num_threads=1,
        adapters=AdapterSettings(max_rank=4) if adapters else None,
    )  # fmt: skip
    with BackgroundLoop() as loop, forks_for_spawns():
        engine = EmbeddedEngine(settings, loop=loop, log_path=directory / "engine.log")
        try:
            yield Policy.from_pretrained(path, **adapters), engine, getattr(torch, dtype)  # type: ignore[arg-type]
        finally:
            loop.run(engine.close())


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    with both(FAMILY, request.param, tmp_path_factory.mktemp(request.param)) as started:
        yield started


def head_of(policy: Policy) -> FusedHead:
    head = policy.causal_lm.get_output_embeddings()
    assert isinstance(head, FusedHead)
    return head


@contextmanager
def synced(side: Side) -> Iterator[WeightSync]:
    policy, engine, dtype = side

    def score(ids: list[int], error: float = 0.0) -> list[float]:
        is_half = dtype is torch.bfloat16
        with torch.no_grad(), rounding_errors(policy, error), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            return policy(collate([whole_row(ids)], [0]), with_entropy=False)[0].tolist()

    whole = WholeRow(every=1, score=partial(whole_scores, policy, score), rounding=rounding_of(dtype, "cpu"))  # type: ignore[arg-type]
    canary = CanarySettings(whole=whole)
    sync = WeightSync(module=policy.model, engines=[engine], score_canary=score, canary=canary, deadline_s=60)
    try:
        yield sync
    finally:
        sync.close()


@pytest.mark.v2
def test_equal_weights_have_equal_distributions(side: Side) -> None:
    with synced(side) as sync:
        metrics = sync.push(1).metrics()
    assert metrics["sync/distribution_kl"] < metrics["sync/distribution_kl_limit"] / 10
    assert metrics["sync/distribution_move"] < metrics["sync/distribution_move_limit"] / 4
    assert metrics["sync/distribution_kl"] < (1e-11 if side[2] is torch.float32 else 1e-3)
    size = side[2].itemsize * VOCAB * 23
    assert 2 * size < metrics["sync/distribution_bytes"] < 2.8 * size, "the first comparison asks the engine twice"


def wrong_bias(policy: Policy, size: float) -> None:
    """Add to the bias of one token; the head has none that a sync would send."""
    bias = torch.zeros(VOCAB)
    bias[TOKEN] = size
    head_of(policy).bias = nn.Parameter(bias, requires_grad=False)


def no_bias(policy: Policy) -> None:
    head_of(policy).bias = None


def test_the_bias_of_a_token_that_is_not_sampled_is_seen_by_them_alone(side: Side) -> None:
    policy, *_ = side
    with synced(side) as sync:
        canary = sync._canary
        assert canary is not None
        whole, canary.whole = canary.whole, None
        wrong_bias(policy, 0.1 if side[2] is torch.float32 else 1.0)
        try:
            assert sync.push(2).canary_abs_diff < CANARY_THRESHOLD[side[2]], "sampled tokens do not show it"
            canary.whole = whole
            with pytest.raises(SyncError, match=rf"ids that move most: {TOKEN} \(log p .*does not compute what the"):
                sync.push(3)
        finally:
            no_bias(policy)
    with synced(side) as sync:
        sync.push(4)  # resumes the engine


@pytest.mark.parametrize("fault", ["row of the head", "stale layer"])
def test_weights_that_were_not_sent_are_seen(side: Side, fault: str) -> None:
    """The engine has the weights of before: what a sync that skips a tensor leaves behind."""
    policy, _, dtype = side
    weight = (
        head_of(policy).weight if fault == "row of the head" else policy.causal_lm.model.layers[1].mlp.up_proj.weight
    )
    with synced(side) as sync:
        sync.push(5)
        whole, ids, plane = sync._canary.whole, sync._canary._ids, sync._engines  # type: ignore[union-attr]
        assert whole is not None
        settings = {"factor": 10.0, "least": SMALLEST_MEDIAN[dtype], "threshold": None, "is_quantized": False}
        before = weight.detach().clone()
        with torch.no_grad():
            if fault == "row of the head":
                weight[TOKEN] = 0
            else:
                weight.add_(torch.randn_like(weight), alpha=1e-3 * weight.std().item())
        try:
            (found,) = whole.compare(plane, ids, whole.expected(ids), **settings).values()
        finally:
            weight.data.copy_(before)
        if fault == "row of the head":
            assert found.is_wrong
            assert int(found.distance.move_V.argmax()) == TOKEN
        else:  # a thousandth of a layer is below the rounding of bfloat16
            assert found.is_wrong is (dtype is torch.float32)
        (found,) = whole.compare(plane, ids, whole.expected(ids), **settings).values()
        assert not found.is_wrong


@pytest.mark.v2
def test_other_requests_in_the_same_batches_do_not_matter(side: Side) -> None:
    _, engine, _ = side
    ids = canary_ids(VOCAB)

    async def crowded() -> torch.Tensor:
        has_heard, have_begun = asyncio.Event(), [asyncio.Event() for _ in range(30)]

        async def sample_on(seed: int) -> None:
            while not has_heard.is_set():
                await engine.generate((5, 6, 7, seed), Sampling(max_tokens=40, ignore_eos=True, seed=seed))
                have_begun[seed].set()

        others = [asyncio.create_task(sample_on(seed)) for seed in range(30)]
        await asyncio.gather(*(one.wait() for one in have_begun))
        logits, _ = await hear(engine, ids, range(23))
        assert not any(task.done() for task in others)
        has_heard.set()
        await asyncio.gather(*others)
        return logits

    alone, _ = engine.loop.run(hear(engine, ids, range(23)))
    tolerance = 1e-4 if alone.dtype is torch.float32 else 0.1
    torch.testing.assert_close(engine.loop.run(crowded()), alone, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_a_softcap_is_the_same_on_both_sides(tmp_path: Path) -> None:
    with both("gemma2", "float32", tmp_path) as side, synced(side) as sync:
        metrics = sync.push(1).metrics()
        assert metrics["sync/distribution_kl"] < 1e-11
        side[0].softcap = 28.0  # 30 in the engine
        with pytest.raises(SyncError, match="over the whole vocabulary"):
            sync.push(2)


@pytest.mark.slow
def test_adapters_are_on_both_sides(tmp_path: Path) -> None:
    with both("qwen3", "float32", tmp_path, lora=LoraConfig(rank=4, alpha=8)) as side, synced(side) as sync:
        assert sync.push(1).metrics()["sync/distribution_kl"] < 1e-11
        perturb_adapters(side[0], seed=1)
        assert sync.push(2).metrics()["sync/distribution_kl"] < 1e-11
