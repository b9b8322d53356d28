"""Two ranks of DeepSpeed ZeRO-3 (and DDP) over gloo, one with images and one without, give the gradient of one process.

The file is its own worker. Each rank gathers the weights of the tower in every pack, so a rank that left it out would
let the other wait for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.ranks import run_ranks
from tests.integration.test_policy_zero3 import DDP, DEEPSPEED, ZERO3, loss_of

RELATIVE_TOLERANCE = 1e-5
MICROBATCHES = {0: [[1, 2], [4, 5]], 1: [[0, 3], []]}
"""Rows of each microbatch by rank: rank 0 has all images, rank 1 texts and a dummy."""


def worker(directory: Path, *, trains_tower: bool) -> None:
    import torch
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedType
    from deepspeed.utils import safe_get_full_grad

    from lockstep.trainer.batch.packing import StepLayout, collate
    from lockstep.trainer.distributed.distributed import skip_deepspeed_builds
    from lockstep.trainer.model.layers.vision import image_source
    from lockstep.trainer.model.policy import Policy
    from tests.fixtures.vision_models import adds_alike, by_digest, images_of, rows_of

    skip_deepspeed_builds()
    name = (directory / "name").read_text()
    images = images_of(name)
    rows = rows_of(images)
    layout = StepLayout.of(rows)
    settings: dict[str, Any] = {"sees_images": True, "trains_tower": trains_tower}
    reference = Policy.from_pretrained(directory / "model", **settings)
    source = image_source(reference.causal_lm.config, by_digest(images))
    loss_of(reference, collate(rows, range(len(rows)), images=source), layout.num_tokens, 1.0).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}

    wants_ddp = os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true"
    accelerator = Accelerator(cpu=wants_ddp, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    assert is_deepspeed != wants_ddp
    if is_deepspeed:
        plugin = accelerator.state.deepspeed_plugin
        assert plugin is not None
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    policy = Policy.from_pretrained(directory / "model", gradient_checkpointing=True, **settings)
    names_of = dict(policy.named_parameters())
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    engine, _ = accelerator.prepare(policy, torch.optim.SGD(trained, lr=0.1))
    engine.train()
    if is_deepspeed:
        assert all(parameter.numel() == 0 for parameter in policy.parameters()), "the parameters are not partitioned"

    own = MICROBATCHES[accelerator.process_index]
    for step, indices in enumerate(own):
        packed = collate(rows, indices, layout, images=source, device=accelerator.device)
        assert (packed.images is not None) == accelerator.is_main_process
        is_last = step == len(own) - 1
        if is_deepspeed:
            engine.set_gradient_accumulation_boundary(is_last)
            engine.backward(loss_of(engine, packed, layout.num_tokens, accelerator.num_processes))
        else:
            with contextlib.nullcontext() if is_last else accelerator.no_sync(engine):
                loss_of(engine, packed, layout.num_tokens, accelerator.num_processes).backward()

    errors: dict[str, float] = {}
    for name, gradient in expected.items():
        parameter = names_of[name]
        assert parameter.requires_grad == (gradient is not None), name
        if gradient is not None:
            ours = safe_get_full_grad(parameter) if is_deepspeed else parameter.grad
            assert ours is not None, name
            errors[name] = ((ours - gradient).norm() / (1 if adds_alike(name) else gradient.norm())).item()
    if accelerator.is_main_process:
        (directory / "report.json").write_text(json.dumps(errors))
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    del engine
    accelerator.end_training()


def launch(directory: Path, *, config: str, name: str, trains_tower: bool) -> dict[str, float]:
    from tests.fixtures.vision_models import vision_model

    vision_model(name).save_pretrained(directory / "model")
    (directory / "name").write_text(name)
    (directory / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    (directory / "accelerate.yaml").write_text(config)
    launcher = ("accelerate.commands.launch", "--config_file", str(directory / "accelerate.yaml"))
    worker_arguments = (__file__, directory, "trained" if trains_tower else "frozen")
    result = run_ranks((*launcher, "--main_process_port", "0"), *worker_arguments, timeout_s=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return json.loads((directory / "report.json").read_text())


def is_of_tower(name: str) -> bool:
    return "language_model" not in name and "lm_head" not in name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "trains_tower"), [("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", True), ("gemma3", True)]
)
def test_zero3_with_images_on_one_of_two_ranks_gives_the_gradient_of_one_process(
    tmp_path: Path, name: str, trains_tower: bool
) -> None:
    config = ZERO3.format(deepspeed=tmp_path / "deepspeed.json", init="true")
    errors = launch(tmp_path, config=config, name=name, trains_tower=trains_tower)
    assert max(errors.values()) < RELATIVE_TOLERANCE, errors
    assert any(map(is_of_tower, errors)) == trains_tower


@pytest.mark.distributed
def test_ddp_with_images_on_one_of_two_ranks_gives_the_gradient_of_one_process(tmp_path: Path) -> None:
    errors = launch(tmp_path, config=DDP, name="qwen2_5_vl", trains_tower=True)
    assert max(errors.values()) < RELATIVE_TOLERANCE, errors
    assert any(map(is_of_tower, errors))


if __name__ == "__main__":
    worker(Path(sys.argv[1]), trains_tower=sys.argv[2] == "trained")
