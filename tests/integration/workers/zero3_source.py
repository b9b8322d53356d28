"""Worker of `test_zero3_source.py` under torchrun on two ranks: reads ZeRO-3 models through a weight source.

Each rank writes its observations to `<directory>/rank<n>.json` for the test.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import zero
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep.rollout.weights.shards import Fetch
from lockstep.rollout.weights.source import ZeroSource, nbytes
from lockstep.trainer.distributed.distributed import skip_deepspeed_builds
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
    skip_deepspeed_builds()
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
            "parts": in_parts(ZeroSource(engine, bucket_bytes=BUCKET_BYTES, readers=[0]), whole[None]),
            "parts_bfloat16": in_parts(ZeroSource(engine, dtype=torch.bfloat16, readers=[0]), whole[torch.bfloat16]),
            "gives_up": gives_up_on_its_parts(
                ZeroSource(engine, bucket_bytes=BUCKET_BYTES, readers=[0]), whole[None], rank
            ),
            "never_begins": never_begins(ZeroSource(engine, bucket_bytes=BUCKET_BYTES, readers=[0]), whole[None], rank),
            "still_sharded": all(param.numel() == 0 for param in engine.parameters()),
        }
    adapted = with_adapter()
    alone = {name: one.clone() for name, one in ZeroSource(copy.deepcopy(adapted), adapters_only=True)}
    engine = sharded(adapted, stage3_param_persistence_threshold=0)
    seen["adapters_alone"] = {
        "all": differing(ZeroSource(engine, adapters_only=True, bucket_bytes=1024), alone),
        "parts": in_parts(ZeroSource(engine, adapters_only=True, bucket_bytes=1024, readers=[0]), alone),
        "names": sorted(alone),
    }
    engine = sharded(tiny_qwen3(tied=False))  # DeepSpeed's default keeps small parameters whole
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
    seen["exchanged"] = exchanged(ZeroSource(engine, bucket_bytes=BUCKET_BYTES, readers=[0]))
    seen["passes"] = {size: one_pass(ZeroSource(engine, bucket_bytes=size, readers=[0])) for size in (1, 2**30)}
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))


def tiny_experts() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, num_experts=3, num_experts_per_tok=2))


def with_adapter() -> torch.nn.Module:
    adapted = get_peft_model(
        tiny_qwen3(tied=True), LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    )
    perturb(adapted, seed=2)  # a new adapter is zero
    return adapted


def differing(source: ZeroSource, expected: dict[str, torch.Tensor]) -> dict[str, object]:
    found = dict(source)
    return {"count": len(found), "wrong": [name for name in found if not torch.equal(found[name], expected[name])]}


def stops_early(source: ZeroSource, expected: dict[str, torch.Tensor], rank: int) -> dict[str, object]:
    """Rank 0 stops within the third bucket; then both make a whole pass."""
    passing = iter(source)
    if rank == 0:
        for _ in range(20):
            next(passing)
        source.drain()
    else:
        list(passing)
    return differing(source, expected)


def gives_up_on_its_parts(source: ZeroSource, expected: dict[str, torch.Tensor], rank: int) -> dict[str, object]:
    """Rank 0 stops in the third bucket; then both make a whole pass, whose parts are complete."""
    passing = source.own_parts()
    if rank == 0:
        for _ in range(3):
            next(passing)
        source.drain()
    else:
        list(passing)
    return in_parts(source, expected)


def never_begins(source: ZeroSource, expected: dict[str, torch.Tensor], rank: int) -> dict[str, object]:
    """Rank 0 fails before the first exchange, of parts and of whole tensors; then both make a whole pass."""
    seconds = 0.0
    for parts in (True, False):
        source.expect(parts=parts)
        started = time.monotonic()
        if rank == 0:
            source.drain()
        elif parts:
            list(source.own_parts())
        else:
            list(source)
        seconds = max(seconds, time.monotonic() - started)
        assert not source.is_exchanging
    return {"seconds": seconds, **in_parts(source, expected)}


def in_parts(source: ZeroSource, expected: dict[str, torch.Tensor]) -> dict[str, object]:
    """Assemble the parts that the ranks send to an engine of rank 0, and record their storage."""
    tensors = [tensor for bucket in source._buckets for tensor in bucket.tensors]
    held: list[Any] = [one.param.ds_tensor for tensor in tensors for one in tensor.ranges]  # type: ignore[attr-defined]
    exchange, exchanges = dist.batch_isend_irecv, 0

    def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal exchanges
        exchanges += 1
        return exchange(messages)

    dist.batch_isend_irecv = counted
    sent = [one for bucket in source.own_parts() for one in bucket]
    dist.batch_isend_irecv = exchange
    by_rank: list[Any] = [None, None]
    dist.all_gather_object(by_rank, [one.elements for one in sent if one.to_all or dist.get_rank() == 0])
    arriving = [iter(of_one) for of_one in by_rank]
    plan: list[Any] = [source.parts()]
    dist.broadcast_object_list(plan)
    wrong = []
    for meta, parts in zip(source.metadata, plan[0], strict=True):
        whole = torch.empty(meta.shape, dtype=meta.dtype)
        covered = 0
        for part in parts:
            assert part.start == covered
            covered += part.count
            whole.view(-1)[part.start : part.start + part.count] = next(arriving[part.sender])
        if covered != whole.numel() or not torch.equal(whole, expected[meta.name]):
            wrong.append(meta.name)
    return {
        "count": len(plan[0]),
        "wrong": wrong,
        "sent": len(sent),
        "sent_from_elsewhere": sum(not is_within(one.elements, held) for one in sent),
        "not_sent": sum(1 for of_one in arriving for _ in of_one),
        "exchanges": exchanges,
    }


def is_within(tensor: torch.Tensor, wholes: Sequence[torch.Tensor]) -> bool:
    first = tensor.data_ptr()
    return any(
        whole.data_ptr() <= first and first + tensor.nbytes <= whole.data_ptr() + whole.nbytes for whole in wholes
    )


def exchanged(source: ZeroSource) -> dict[str, Any]:
    """Return the bytes and the messages of each exchange of a pass, and the bytes of the model's tensors."""
    exchange, sizes, counts = dist.batch_isend_irecv, [], []

    def counted(messages: list[dist.P2POp]) -> list[dist.Work]:
        counts.append(len(messages))
        sizes.append(sum(message.tensor.nbytes for message in messages))
        return exchange(messages)

    dist.batch_isend_irecv = counted
    for _ in source:
        pass
    dist.batch_isend_irecv = exchange
    of_tensors = [nbytes(meta) for meta in source.metadata]
    return {"sizes": sizes, "counts": counts, "of_tensors": of_tensors}


def one_pass(source: ZeroSource) -> dict[str, Any]:
    """Return the exchanges of a pass, the order of fetches and takes of its buckets, and the kept memory."""
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
