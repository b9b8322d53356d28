"""Settings that save memory keep the gradient, also on several ranks: adapters, bfloat16, checkpointing, back-off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, run_ranks
from tests.integration.test_gradients import relative_error

WORKERS = Path(__file__).parent / "workers"
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def launch(worker: str, *arguments: object, launcher: str | None = None) -> str:
    done = run_ranks(accelerate(launcher) if launcher else (), WORKERS / worker, *arguments, timeout_s=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Result of one process with adapters in float32."""
    out = tmp_path_factory.mktemp("adapters")
    launch("adapters.py", model, out, "float32")
    return out


def arrays(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as found:
        return dict(found)


def flat(gradients: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients) if name != "scored"])


@pytest.mark.parametrize(
    ("launcher", "dtype", "error"),
    [
        ("zero3", "float32", 1e-5),
        ("zero3", "bfloat16", 0.1),
        (None, "bfloat16", 0.1),
    ],
    ids=["zero3", "zero3 bfloat16", "plain bfloat16"],
)
def test_adapters_have_one_gradient_and_one_merged_model(
    launcher: str | None, dtype: str, error: float, model: Path, adapters: Path, tmp_path: Path
) -> None:
    launch("adapters.py", model, tmp_path, dtype, launcher=launcher)
    expected, found = arrays(adapters / "gradients.npz"), arrays(tmp_path / "gradients.npz")
    assert found.keys() == expected.keys()
    assert all("lora_" in name for name in found.keys() - {"scored"})
    assert np.linalg.norm(flat(expected)) > 1e-4
    found_error = relative_error(flat(found), flat(expected))
    assert found_error < error, f"relative error {found_error:.1e} of the gradient"
    if dtype == "bfloat16":
        assert found_error > 1e-4, "nothing was computed in bfloat16"
        assert np.abs(found["scored"] - expected["scored"]).mean() < 0.05
    whole, merged = load_file(adapters / "model/model.safetensors"), load_file_float(tmp_path / "model")
    assert merged.keys() == whole.keys()
    tolerance = 1e-6 if dtype == "float32" or launcher is None else 0.01  # ZeRO keeps the weights in bfloat16
    for name, tensor in merged.items():
        np.testing.assert_allclose(tensor, whole[name], rtol=tolerance, atol=tolerance, err_msg=name)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 100_000
    base = load_file(model / "model.safetensors")
    assert any(np.abs(tensor - base[name]).max() > 0.01 for name, tensor in merged.items()), "nothing was merged"


def load_file_float(directory: Path) -> dict[str, np.ndarray]:
    """Convert to float32, because numpy has no bfloat16."""
    from safetensors.torch import load_file as load

    return {name: tensor.to(torch.float32).numpy() for name, tensor in load(directory / "model.safetensors").items()}


def test_one_rank_out_of_memory_repeats_the_step_on_all_ranks(model: Path, tmp_path: Path) -> None:
    """Under DDP, rank 1 has memory for 80 tokens and rank 0 for all."""
    launch("gradients.py", model, tmp_path / "expected.npz", "grpo", 100_000)
    output = launch("out_of_memory.py", model, tmp_path / "found.npz", "grpo", 100_000, 80, launcher="ddp")
    assert "out of memory with token_budget=100000" in output, "memory never ran out, so nothing was tested"
    expected, found = arrays(tmp_path / "expected.npz"), arrays(tmp_path / "found.npz")
    for each in (expected, found):
        for name in ("policy/scored", "reference/scored", "shared_tokens_frac"):
            each.pop(name)
    assert relative_error(flat(found), flat(expected)) < 1e-5
