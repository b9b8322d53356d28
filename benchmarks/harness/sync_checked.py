"""Whole syncs of one model into real vLLM, on two ZeRO-3 ranks under torchrun. Rank 0 prints one JSON line.

Engine and trainer start from a checkpoint of random weights. The checks of a sync are timed separately:

    versions     each engine reports the version of its weights
    canary       24 tokens scored by the engine and by the trainer (with all ranks under ZeRO-3)
    checksums    of every parameter on both sides; a run computes them only after a failed canary
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
import torch.distributed as dist

from harness.models import small_qwen3
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.checksums import describe_differences
from lockstep.rollout.weights.sync import WeightSync

MAX_MODEL_LEN = 256


def median_s(act: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("hidden", "layers", "vocab", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    is_main = dist.get_rank() == 0
    model = small_qwen3(hidden=args.hidden, layers=args.layers, vocab=args.vocab)
    with tempfile.TemporaryDirectory() as directory, BackgroundLoop() as loop:
        engines = []
        if is_main:
            model.save_pretrained(directory)
            engines = [
                EmbeddedEngine(
                    EngineSettings(model=directory, max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.125, num_threads=1),
                    loop=loop,
                    log_path=Path(directory) / "engine.log",
                )
            ]
        settings = {"stage": 3, "stage3_param_persistence_threshold": 0}
        trainer, *_ = deepspeed.initialize(
            model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings}
        )

        def score(ids: list[int]) -> list[float]:
            logprobs = torch.log_softmax(trainer(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)
            return logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

        sync = WeightSync(module=trainer, engines=engines, score_canary=score)
        versions = iter(range(1, 1000))
        reports = [sync.push(next(versions))]  # the first one allocates and connects
        sync_s = median_s(lambda: reports.append(sync.push(next(versions))), args.repeats)
        canary = sync._canary
        canary_s = median_s(lambda: canary.compare(sync._engines, canary.expected(is_long=False)), args.repeats)

        def checksums() -> None:
            sums = [loop.run(engine.weight_checksums()) for engine in engines]
            weights = iter(sync._source)
            describe_differences(weights, sums[0]) if is_main else list(weights)

        checksums_s = median_s(checksums, args.repeats)
        if is_main:
            stamps = [time.perf_counter(), loop.run(engines[0].weight_version()), time.perf_counter()]
            timed_reports = reports[1:]
            result = {
                "MB": timed_reports[0].bytes / 1e6,
                "sync s": sync_s,
                "gather s": statistics.median(report.gather_s for report in timed_reports),
                "transfer and load s": statistics.median(report.transfer_s for report in timed_reports),
                "pause s": statistics.median(report.pause_s for report in timed_reports),
                "versions s": stamps[2] - stamps[0],
                "canary s": canary_s,
                "checksums s": checksums_s,
                "canary diff": max(report.canary_abs_diff for report in timed_reports),
            }
            print(json.dumps(result), flush=True)
        dist.barrier()
        sync.close()
        for engine in engines:
            loop.run(engine.close())


if __name__ == "__main__":
    main()
