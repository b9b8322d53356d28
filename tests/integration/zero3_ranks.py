"""Worker of `test_zero3_sync.py` under torchrun on two ranks: trains a ZeRO-3 model, rank 0 with an engine.

Each rank writes its observations to `<directory>/rank<n>.json` for the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError, SyncError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.shards import Fetch
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.distributed.distributed import skip_deepspeed_builds
from tests.fixtures.models import perturb, sampled_logprobs, save_tiny_model, tiny_qwen3
from tests.fixtures.processes import descendants

BUCKET_BYTES = 64 * 1024
PROMPT = tuple(range(10, 180))


def main(directory: Path) -> None:
    skip_deepspeed_builds()
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    model = tiny_qwen3(tied=True)
    if rank == 0:
        save_tiny_model(directory / "model", tied=True)
    perturb(model, seed=1)
    trained, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        },
    )
    seen: dict[str, object] = {"exchanges": exchanges_of_ranks()}

    def score(ids: list[int]) -> list[float]:
        return sampled_logprobs(trained, tuple(ids[:1]), tuple(ids[1:]))

    loop = BackgroundLoop()
    engine = None
    if rank == 0:
        engine = EmbeddedEngine(
            EngineSettings(model=directory / "model", max_model_len=320, kv_cache_gib=0.0625, num_threads=1),
            loop=loop,
            log_path=directory / "engine.log",
        )
    sync = WeightSync(
        module=trained, engines=[engine] if engine else [], score_canary=score, bucket_bytes=BUCKET_BYTES, deadline_s=60
    )
    seen["syncs"] = []
    for version in (1, 2):
        report = sync.push(version)
        call = [None]
        if engine is not None:
            sampling = Sampling(max_tokens=24, ignore_eos=True, seed=version)
            call = [loop.run(engine.generate(PROMPT, sampling))]
        dist.broadcast_object_list(call)
        expected = sampled_logprobs(trained, call[0].prompt_ids, call[0].sampled_ids)
        mismatch = max(abs(a - b) for a, b in zip(expected, call[0].sampled_logprobs, strict=True))
        seen["syncs"].append({"mismatch": mismatch, "version": call[0].oldest_version} | report.metrics())
        trained.backward(trained(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss)
        trained.step()

    seen["one_rank_fails"] = raised(lambda: failing_push(sync, rank))
    seen["one_rank_fails_in_a_gather"] = raised(lambda: failing_gather(sync, rank))
    if engine is not None:
        loop.run(engine.resume())
        for pid in descendants(os.getpid()) - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)
        request = loop.run
        seen["generate_on_dead"] = raised(lambda: request(engine.generate(PROMPT, Sampling(max_tokens=4)), 30))
        seen["generate_again"] = raised(lambda: request(engine.generate(PROMPT, Sampling(max_tokens=4)), 30))
    dist.barrier()
    seen["push_on_dead"] = raised(lambda: sync.push(9))
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))


def failing_push(sync: WeightSync, rank: int) -> None:
    """Rank 1 fails after the last gather, where rank 0 would wait for its next collective."""
    send = sync._transport.send_weights

    def fail() -> None:
        send()
        raise OSError("out of host memory")

    if rank == 1:
        sync._transport.send_weights = fail  # type: ignore[method-assign]
    try:
        sync.push(3)
    finally:
        sync._transport.send_weights = send  # type: ignore[method-assign]


def failing_gather(sync: WeightSync, rank: int) -> None:
    """Rank 1 fails after its fourth exchange; the others continue with the fifth."""
    wait, count = Fetch.wait, 0

    def fail(fetch: Fetch) -> None:
        nonlocal count
        count += 1
        wait(fetch)
        if count == 4:
            raise OSError("out of memory in a gather")

    if rank == 1:
        Fetch.wait = fail  # type: ignore[method-assign]
    try:
        sync.push(4)
    finally:
        Fetch.wait = wait  # type: ignore[method-assign]


def raised(act: object) -> dict[str, object]:
    started = time.monotonic()
    try:
        act()  # type: ignore[operator]
    except (EngineError, SyncError) as error:
        return {"error": type(error).__name__, "text": str(error), "after_s": time.monotonic() - started}
    return {"error": None}


def exchanges_of_ranks() -> list[int]:
    """Record the size of each later exchange of weights between the ranks."""
    sizes: list[int] = []
    original = dist.batch_isend_irecv

    def counted(exchanges: list[dist.P2POp]):
        sizes.append(len(exchanges))
        return original(exchanges)

    dist.batch_isend_irecv = counted
    return sizes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
