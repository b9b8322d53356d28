"""Run by `test_zero3_source.py` under torchrun, two ranks: what a weight source reads out of ZeRO-3 models.

Writes what each rank saw to `<directory>/rank<n>.json`; the test judges it.
"""

from __future__ import annotations

import copy
import json
import sys
import weakref
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import zero
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm.distributed.weight_transfer.base import ParamMeta

from rollout.buckets import bucket_layout, views
from rollout.shards import Fetch
from rollout.source import ZeroSource
from tests.fixtures.families import HEADS, SIZES
from tests.fixtures.models import perturb, tiny_qwen3
from trainer.distributed import build_nothing

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
    build_nothing()
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
            "placed": placed(ZeroSource(engine, bucket_bytes=BUCKET_BYTES, readers=[0]), whole[None]),
            "placed_bfloat16": placed(ZeroSource(engine, dtype=torch.bfloat16, readers=[0]), whole[torch.bfloat16]),
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
    seen["no_room"] = no_room(ZeroSource(engine, bucket_bytes=BUCKET_BYTES, readers=[0]), whole_now, rank)
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


def no_room(source: ZeroSource, expected: dict[str, torch.Tensor], rank: int) -> dict[str, object]:
    """Rank 0 cannot say where its third bucket is to go; then a whole pass of both."""
    asked = 0

    def place(metas: Sequence[ParamMeta]) -> list[torch.Tensor]:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise OSError("no room")
        return [torch.empty(meta.shape, dtype=meta.dtype) for meta in metas]

    try:
        list(source.tensors(place))
    except OSError:
        source.drain()
    return {"asked": asked, "kept": len(source._arriving)} | differing(source, expected)


def placed(source: ZeroSource, expected: dict[str, torch.Tensor]) -> dict[str, object]:
    """A pass whose tensors are wanted in two buckets in turns, and where its messages began and ended."""
    size = max(bucket_layout(metas)[1] for metas in source.buckets())
    buckets = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    turns = cycle(buckets)
    entries = [entry for bucket in source._buckets for entry in bucket.entries]
    shards: list[Any] = [piece.param.ds_tensor for entry in entries for piece in entry.pieces]  # type: ignore[attr-defined]
    sent, received, wrong, elsewhere, count = [], [], [], [], 0
    exchange = dist.batch_isend_irecv

    def watched(messages: list[dist.P2POp]) -> list[dist.Work]:
        for message in messages:
            (sent if message.op is dist.isend else received).append(message.tensor)
        return exchange(messages)

    dist.batch_isend_irecv = watched
    for name, tensor in source.tensors(lambda metas: [view for _, view in views(next(turns), metas)]):
        count += 1
        if not torch.equal(tensor, expected[name]):
            wrong.append(name)
        if not is_within(tensor, buckets):
            elsewhere.append(name)
    dist.batch_isend_irecv = exchange
    return {
        "count": count,
        "wrong": wrong,
        "elsewhere": elsewhere,
        "received": len(received),
        "received_elsewhere": sum(not is_within(message, buckets) for message in received),
        "sent": len(sent),
        "sent_from_elsewhere": sum(not is_within(message, shards) for message in sent),
    }


def is_within(tensor: torch.Tensor, wholes: Sequence[torch.Tensor]) -> bool:
    first = tensor.data_ptr()
    return any(
        whole.data_ptr() <= first and first + tensor.nbytes <= whole.data_ptr() + whole.nbytes for whole in wholes
    )


def one_pass(source: ZeroSource) -> dict[str, Any]:
    """Exchanges of a pass, how the fetching and the taking of its buckets followed each other, and what stays."""
    events: list[str] = []
    begin, wait = Fetch.begin, Fetch.wait

    def begun(self: Fetch, values: Sequence[torch.Tensor]) -> None:
        events.append("begin")
        begin(self, values)

    Fetch.begin = begun  # type: ignore[method-assign]
    Fetch.wait = lambda self: (events.append("wait"), wait(self))[1]  # type: ignore[method-assign,func-returns-value]
    given = []
    for name, tensor in source:
        events.append(name)
        given.append(weakref.ref(tensor))
        del tensor
    Fetch.begin, Fetch.wait = begin, wait  # type: ignore[method-assign]
    return {
        "events": events,
        "buckets": [[meta.name for meta in metas] for metas in source.buckets()],
        "kept": sum(tensor() is not None for tensor in given),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
