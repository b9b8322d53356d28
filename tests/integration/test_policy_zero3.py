"""Two ranks of DeepSpeed ZeRO-3 (and DDP) over gloo give the gradient of one process, with tied and untied heads.

The file is its own worker: `accelerate launch` runs it on two ranks with different rows and numbers of microbatches,
so that one of them runs a dummy pack.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.ranks import run_ranks

RELATIVE_TOLERANCE = 1e-6
LENGTHS = (40, 9, 17, 5, 23)
MICROBATCHES = {0: [[0], [1, 2]], 1: [[3, 4], []]}
"""Rows of each microbatch by rank; the last microbatch of rank 1 is a dummy."""
TEMPERATURE = 0.7


def row_of(ids: np.ndarray, mask: np.ndarray, index: int) -> Any:
    from lockstep.rollout.records import TrainingRow

    return TrainingRow(
        ids=ids,
        loss_mask=mask,
        sampling_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.where(mask, 0, -1).astype(np.int32),
        rollout_id=index,
    )


def training_rows() -> list:
    rng = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(LENGTHS):
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        rows.append(row_of(rng.integers(0, 512, length), mask, index))
    return rows


def save_model(directory: Path, *, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")


def loss_of(module, packed, num_tokens: int, scale: float):
    """A function of both outputs, with one denominator for the whole step."""
    logp_T, entropy_T = module(packed, temperature=TEMPERATURE, with_entropy=True)
    weight_T = 1.0 + packed.rollout_T.to(logp_T.dtype)
    return ((weight_T * logp_T).sum() + 0.1 * entropy_T.sum()) * scale / num_tokens


def worker(directory: Path) -> None:
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedType
    from deepspeed.utils import safe_get_full_grad

    from lockstep.trainer.batch.packing import StepLayout, collate
    from lockstep.trainer.distributed.distributed import skip_deepspeed_builds
    from lockstep.trainer.model.policy import Policy

    skip_deepspeed_builds()
    rows = training_rows()
    layout = StepLayout.of(rows)
    reference = Policy.from_pretrained(directory / "model").train()
    loss_of(reference, collate(rows, range(len(rows))), layout.num_tokens, 1.0).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}

    # Without cpu=True, Accelerate on a machine without a GPU wraps nothing (DistributedType.NO with two processes);
    # with it, DeepSpeed is switched off.
    wants_ddp = os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true"
    accelerator = Accelerator(cpu=wants_ddp, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    assert accelerator.distributed_type != DistributedType.NO, "nothing would reduce gradients over the ranks"
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if is_deepspeed:
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    # From here on transformers loads models partitioned by ZeRO-3, as in training.
    policy = Policy.from_pretrained(directory / "model", gradient_checkpointing=True)
    names_of = dict(policy.named_parameters())
    engine, _ = accelerator.prepare(policy, torch.optim.SGD(policy.parameters(), lr=0.1))
    engine.train()
    if is_deepspeed:
        assert all(parameter.numel() == 0 for parameter in policy.parameters()), "the parameters are not partitioned"

    own = MICROBATCHES[accelerator.process_index]
    for step, indices in enumerate(own):
        packed = collate(rows, indices, layout, device=accelerator.device)
        is_last = step == len(own) - 1
        if is_deepspeed:
            engine.set_gradient_accumulation_boundary(is_last)
            engine.backward(loss_of(engine, packed, layout.num_tokens, accelerator.num_processes))
        else:
            # DDP decides in forward whether the backward that follows reduces gradients.
            with contextlib.nullcontext() if is_last else accelerator.no_sync(engine):
                loss_of(engine, packed, layout.num_tokens, accelerator.num_processes).backward()

    found = {name: safe_get_full_grad(p) if is_deepspeed else p.grad for name, p in names_of.items()}
    errors = {}
    for name, gradient in expected.items():
        ours = found[name]
        assert ours is not None, name
        assert gradient is not None, name
        errors[name] = ((ours - gradient).norm() / gradient.norm()).item()
    gathers = [count_gathers(engine, collate(rows, [0]), tile) for tile in (512, 32)] if is_deepspeed else None
    if accelerator.is_main_process:
        (directory / "report.json").write_text(json.dumps({"errors": errors, "gathers": gathers}))
    accelerator.wait_for_everyone()
    # A DDP wrapper that outlives the group frees it while it holds the GIL. The group's thread may need the GIL to end
    # the barrier: a deadlock.
    accelerator.free_memory()
    del engine
    accelerator.end_training()


def count_gathers(engine, packed, tile: int) -> int:
    """Count the collective gathers of one forward and backward pass with vocabulary tiles of this size."""
    import torch

    from lockstep.trainer.model.head import logit_tiles

    logit_tiles.TILE_K = tile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.backward(loss_of(engine, packed, 1, 1.0))
    return sum(event.count for event in profile.key_averages() if "allgather" in event.key.replace("_", "").lower())


ZERO3 = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {deepspeed}
  zero3_init_flag: {init}
machine_rank: 0
num_machines: 1
num_processes: 2
use_cpu: false
"""

# Parameters of fewer than 100,000 elements would by default never be partitioned.
DEEPSPEED = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
}

DDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
machine_rank: 0
num_machines: 1
num_processes: 2
use_cpu: false
"""


def launch(directory: Path, *, config: str, tied: bool) -> dict:
    save_model(directory, tied=tied)
    (directory / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    (directory / "accelerate.yaml").write_text(config)
    launcher = ("accelerate.commands.launch", "--config_file", str(directory / "accelerate.yaml"))
    result = run_ranks((*launcher, "--main_process_port", "0"), __file__, directory, timeout_s=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return json.loads((directory / "report.json").read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_zero3_on_two_ranks_gives_the_gradient_of_one_process(tmp_path, tied):
    config = ZERO3.format(deepspeed=tmp_path / "deepspeed.json", init="true" if tied else "false")
    report = launch(tmp_path, config=config, tied=tied)
    assert max(report["errors"].values()) < RELATIVE_TOLERANCE, report["errors"]
    assert ("model.lm_head.weight" in report["errors"]) != tied
    few_tiles, many_tiles = report["gathers"]
    assert few_tiles == many_tiles > 0, "the head's weight is gathered once per pass, not once per tile"


@pytest.mark.distributed
def test_ddp_on_two_ranks_gives_the_gradient_of_one_process(tmp_path):
    report = launch(tmp_path, config=DDP, tied=True)
    assert max(report["errors"].values()) < RELATIVE_TOLERANCE, report["errors"]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
