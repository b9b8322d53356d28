"""Run by `test_zero3_source.py` under torchrun, two ranks: what a weight source reads out of ZeRO-3 models.

Writes what each rank saw to `<directory>/rank<n>.json`; the test judges it.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import zero
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout.buckets import nbytes
from rollout.shards import Fetch
from rollout.source import ZeroSource
from tests.fixtures.families import HEADS, SIZES
from tests.fixtures.models import perturb, tiny_qwen3

BUCKET_BYTES = 64 * 1024


def sharded(model: torch.nn.Module, **zero_settings: Any) -> Any:
    trainable = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trainable, lr=0.5),  # type: ignore[arg-type]
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, **zero_settings},
            "zero_allow_untested_optimizer": True,
        },
    )
    return engine


def main(directory: Path) -> None:
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    models = {"dense": tiny_qwen3(tied=True), "experts": tiny_experts(), "adapted": with_adapter()}
    seen: dict[str, Any] = {}
    for name, model in models.items():
        whole = {dtype: dict(ZeroSource(copy.deepcopy(model), dtype=dtype)) for dtype in (None, torch.bfloat16)}
        engine = sharded(model, stage3_param_persistence_threshold=0)
        seen[name] = {
            "all": differing(ZeroSource(engine, bucket_bytes=BUCKET_BYTES), whole[None]),
            "all_bfloat16": differing(ZeroSource(engine, dtype=torch.bfloat16), whole[torch.bfloat16]),
            "last": differing(ZeroSource(engine, bucket_bytes=BUCKET_BYTES, readers=[1]), whole[None]),
            "still_sharded": all(param.numel() == 0 for param in engine.parameters()),
        }
    engine = sharded(tiny_qwen3(tied=False))  # at DeepSpeed's default, by which small parameters stay whole
    ids = torch.arange(30)[None] + rank
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    before = dict(ZeroSource(engine))
    engine.step()
    source = ZeroSource(engine)
    with zero.GatheredParameters(list(engine.module.parameters())):
        whole_now = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    after = dict(source)
    seen["after_a_step"] = {
        "differing": [name for name in whole_now if not torch.equal(whole_now[name], after[name])],
        "unmoved": [name for name in before if torch.equal(before[name], after[name])],
    }
    seen["stops_early"] = stops_early(ZeroSource(engine, bucket_bytes=BUCKET_BYTES), whole_now, rank)
    seen["passes"] = {size: one_pass(ZeroSource(engine, bucket_bytes=size, readers=[0])) for size in (1, 2**30)}
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))


def tiny_experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, num_experts=3, num_experts_per_tok=2))


def with_adapter() -> torch.nn.Module:
    adapted = get_peft_model(
        tiny_qwen3(tied=True), LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    )
    perturb(adapted, seed=2)  # an adapter begins as nothing
    return adapted


def differing(source: ZeroSource, expected: dict[str, torch.Tensor]) -> dict[str, object]:
    found = dict(source)
    return {"count": len(found), "wrong": [name for name in found if not torch.equal(found[name], expected[name])]}


def stops_early(source: ZeroSource, expected: dict[str, torch.Tensor], rank: int) -> dict[str, object]:
    """Rank 0 gives up within the third bucket; then a whole pass of both."""
    passing = iter(source)
    if rank == 0:
        for _ in range(20):
            next(passing)
        source.drain()
    else:
        list(passing)
    return differing(source, expected)


def one_pass(source: ZeroSource) -> dict[str, Any]:
    """Exchanges of a pass, and how the fetching and the taking of its buckets followed each other."""
    events: list[str] = []
    begin, wait = Fetch.begin, Fetch.wait

    def begun(self: Fetch, buffer: torch.Tensor) -> None:
        events.append("begin")
        begin(self, buffer)

    Fetch.begin = begun  # type: ignore[method-assign]
    Fetch.wait = lambda self: (events.append("wait"), wait(self))[1]  # type: ignore[method-assign,func-returns-value]
    largest = max(sum(nbytes(entry.meta) for entry in bucket.entries) for bucket in source._buckets)
    buffers = []
    for name, _ in source:
        events.append(name)
        buffers.append(source._buffer.nbytes)
    Fetch.begin, Fetch.wait = begin, wait  # type: ignore[method-assign]
    return {
        "events": events,
        "buckets": [[entry.meta.name for entry in bucket.entries] for bucket in source._buckets],
        "largest_bucket": largest,
        "buffer": max(bucket.fetch.nbytes for bucket in source._buckets),
        "buffer_afterwards": source._buffer.nbytes,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
