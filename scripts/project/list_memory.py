"""Write the tables of docs/memory.md: what runs choose by default on 80 GB GPUs, and measured memory of a peer.

Nothing here was measured by us: the numbers are those of the memory plan. `make docs` runs it; `--check` only says if
the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from lockstep.rollout.errors import ConfigError
from lockstep.scripts.recipes.plan import compose_config, shape_of, sharding_of
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.sharding import Sharding
from lockstep.trainer.model.chosen import with_chosen
from lockstep.trainer.model.memory_plan import GIB, cache_gib_left, memory_plan
from lockstep.trainer.model.shape import ModelShape
from scripts.project.generated import ROOT, filled, main

PAGE = "docs/memory.md"
MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.7B": "Qwen/Qwen3-1.7B-Base",
    "4B": "Qwen/Qwen3-4B",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
    "14B": "Qwen/Qwen3-14B",
    "32B": "Qwen/Qwen3-32B",
}
GPU_GIB = 79.1
"""Memory of an H100 with 80 GB, as torch reports it."""
ROW_TOKENS = 8192
"""`rollout.max_model_len` of the table of defaults."""
SMALL_MODEL = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
"""Qwen3-0.6B."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A way to start a run, in the order in which they are tried: simpler and faster ones first."""

    name: str
    file: str
    offloads: bool = False

    def sharding(self, gpus: int) -> Sharding:
        return replace(sharding_of(self.file, gpus), offloads_optimizer=self.offloads)


ALONE, DDP, ZERO3 = Launch("one process", "single"), Launch("ddp", "ddp"), Launch("zero3", "zero3")
OFFLOAD = Launch("zero3, optimizer offloaded", "zero3", offloads=True)
LAUNCHES = {1: (ALONE, OFFLOAD), 8: (DDP, ZERO3, OFFLOAD)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Peak memory of the trainer that prime-rl measured on H100s, with activation checkpointing, per GPU [GiB]."""

    title: str
    model: str
    gpus: int
    lora_rank: int
    launch: Launch
    measured_gib: float


PEERS = (
    Peer(title="0.6B", model=SMALL_MODEL, gpus=1, lora_rank=0, launch=ALONE, measured_gib=12.5),
    Peer(title="4B", model="Qwen/Qwen3-4B", gpus=1, lora_rank=16, launch=ALONE, measured_gib=23.9),
    Peer(title="4B", model="Qwen/Qwen3-4B", gpus=8, lora_rank=0, launch=ZERO3, measured_gib=17.1),
)
"""Files benchmarks/baselines/benchmark-*-rl-*-Recompute-flash_attention_3-16384-cp1-ep1.json of PrimeIntellect-ai/
prime-rl, of January and February 2026."""


def memory_page() -> str:
    """Return docs/memory.md with its generated tables."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return filled(filled(page, "defaults", defaults()), "peers", peers())


def defaults() -> Iterator[str]:
    yield "| model | GPUs | rollouts | trained | launch | `token_budget` | checkpointing | KV cache | planned per GPU |"
    yield "|---" * 9 + "|"
    for gpus in LAUNCHES:
        for title, model in MODELS.items():
            for rollout in ("colocated", "server"):
                for rank in (0, 16):
                    case = [title, str(gpus), rollout, f"LoRA, rank {rank}" if rank else "all weights"]
                    yield f"| {' | '.join([*case, *cells(model, gpus, rollout, rank)])} |"


def cells(model: str, gpus: int, rollout: str, rank: int) -> list[str]:
    """Return what a run chooses under the first launch with which it fits, or the numbers of its refusal."""
    config, shape = configured(model, rollout, rank, ROW_TOKENS), measured(model, rank)
    refused_gib = 0.0
    for launch in LAUNCHES[gpus]:
        sharding, available = launch.sharding(gpus), int(GPU_GIB * GIB)
        try:
            choice = with_chosen(config, shape, sharding, available=available, say=lambda _: None, on_gpu=True)
            plan = memory_plan(shape, choice, sharding, on_gpu=True)
            left = f"{cache_gib_left(plan, available=available):.0f} GiB" if rollout == "colocated" else "the servers'"
        except ConfigError:
            least = replace(config, token_budget=ROW_TOKENS, model=replace(config.model, gradient_checkpointing=True))
            refused_gib = memory_plan(shape, least, sharding, on_gpu=True).total / GIB
            continue
        checkpointing = "yes" if choice.model.is_checkpointed else "no"
        return [launch.name, f"{choice.pack_tokens:,}", checkpointing, left, f"{plan.total / GIB:.0f} GiB"]
    return [LAUNCHES[gpus][-1].name, "refused", "yes", "none", f"{refused_gib:.1f} GiB"]


def peers() -> Iterator[str]:
    yield "| model | GPUs | trained | prime-rl, measured | Lockstep, planned |"
    yield "|---|---|---|---|---|"
    for peer in PEERS:
        config = configured(peer.model, "server", peer.lora_rank, 16_384)
        config = replace(config, token_budget=16_384, model=replace(config.model, gradient_checkpointing=True))
        plan = memory_plan(measured(peer.model, peer.lora_rank), config, peer.launch.sharding(peer.gpus), on_gpu=True)
        weights = f"LoRA, rank {peer.lora_rank}" if peer.lora_rank else "all weights"
        yield (
            f"| {peer.title} | {peer.gpus} | {weights} | {peer.measured_gib} GiB | "
            f"{plan.total / GIB:.1f} GiB ({peer.launch.name}) |"
        )


def configured(model: str, rollout: str, rank: int, row_tokens: int) -> Config:
    config = composed(rollout, row_tokens)
    return replace(config, model=replace(config.model, path=model, lora=replace(config.model.lora, rank=rank)))


@cache
def composed(rollout: str, row_tokens: int) -> Config:
    return compose_config([f"rollout={rollout}", "model.dtype=bfloat16", f"rollout.max_model_len={row_tokens}"])


@cache
def measured(model: str, rank: int) -> ModelShape:
    return shape_of(configured(model, "server", rank, ROW_TOKENS))


PAGES = {PAGE: memory_page}

if __name__ == "__main__":
    sys.exit(main(PAGES, "Write the tables of docs/memory.md."))
