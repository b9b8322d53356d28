"""A teacher that averages the policy scores with the average of the checkpoint before the step, however it is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.trainer.batch.saved_scores import FILE_SUFFIX, SavedScores
from lockstep.trainer.batch.step_batch import StepBatch
from tests.integration.test_run import demo, metrics, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(600)]

LORA = ("model.lora.rank=8", "model.lora.alpha=16", "optimizer.lr=1e-2")
UPDATES = 3


@pytest.mark.parametrize(
    ("ranks", "launcher", "settings"),
    [
        pytest.param(2, "zero3", LORA, id="adapters of two ZeRO-3 ranks"),
        pytest.param(None, "", (*LORA, "model.lora.send=merged"), id="merged adapters", marks=pytest.mark.slow),
        pytest.param(2, "ddp", LORA, id="adapters of two DDP ranks", marks=pytest.mark.slow),
        pytest.param(2, "zero3", (), id="all weights of two ZeRO-3 ranks"),
    ],
)
def test_the_teacher_scores_with_the_average_of_the_checkpoint_before_the_step(
    ranks: int | None,
    launcher: str,
    settings: tuple[str, ...],
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    train(
        *demo, "algorithm=opd_topk", "algorithm.reward_coef=1", "teacher.source=average", "teacher.average_decay=0.5",
        "optimizer.lr=3e-3", *settings, f"updates={UPDATES}", f"run_root={tmp_path}", "run_name=run",
        "checkpoint.every=1", "checkpoint.keep=9", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        "logger.print_rollouts=0", ranks=ranks, launcher_file=launcher,
    )  # fmt: skip
    run = tmp_path / "run"
    lines = metrics(run)
    assert len(lines) == UPDATES
    assert max(line["teacher/canary_abs_diff"] for line in lines) < 1e-4
    for step in range(2, UPDATES + 1):
        path = run / "rollouts" / f"step-{step:06d}.jsonl"
        batch = StepBatch.of(list(read_rollouts(path)), mask_truncated=False)
        saved = SavedScores.open(path.with_suffix(FILE_SUFFIX))
        assert (saved.teacher, saved.version) == ("teacher.source=average teacher.average_decay=0.5", step - 1)
        found_N = saved.of(batch.rows).logp_N
        checkpoint = run / "checkpoints" / f"step-{step - 1}"
        model = policy_of(checkpoint, demo[0].removeprefix("model.path="))
        averaged = average_of(checkpoint, model)
        assert averaged.keys() == {name for name, one in model.named_parameters() if "lora" in name or not settings}
        model.load_state_dict(averaged, strict=False)
        torch.testing.assert_close(scores(model, batch), found_N, atol=1e-4, rtol=0)
        assert (batch.sampling_logprobs_N - found_N).abs().max() > 1e-2, "the policy and its average are alike"


def policy_of(checkpoint: Path, path: str) -> nn.Module:
    """Return the model with the adapter of a checkpoint, if that has one."""
    base = AutoModelForCausalLM.from_pretrained(path)
    adapter = checkpoint / "adapter"
    return PeftModel.from_pretrained(base, str(adapter)) if adapter.is_dir() else base


def average_of(checkpoint: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the average of a checkpoint from the elements of its ranks, under the names of the model."""
    files = [load_file(file) for file in sorted((checkpoint / "weight_average").iterdir())]
    shapes = {name: value.shape for name, value in model.named_parameters()}
    wholes = {name: torch.cat([file[name].flatten() for file in files]) for name in files[0]}
    return {name: wholes[f"model.{name}"].view(shape) for name, shape in shapes.items() if f"model.{name}" in wholes}


@torch.no_grad()
def scores(model: nn.Module, batch: StepBatch) -> Tensor:
    """Return log π of the trained tokens, row by row."""
    found = []
    for row in batch.rows:
        logp_TV = model(input_ids=torch.from_numpy(row.ids)[None]).logits[0, :-1].log_softmax(-1)
        found.append(logp_TV.gather(1, torch.from_numpy(row.ids[1:])[:, None])[row.loss_mask[1:], 0])
    return torch.cat(found)
