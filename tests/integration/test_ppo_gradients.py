"""One batch gives one gradient of policy and critic, however it is partitioned and sharded."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForTokenClassification

from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, run_ranks

WORKER = Path(__file__).parent / "workers" / "ppo_gradients.py"
ONE_MICROBATCH, MANY_MICROBATCHES = 100_000, 96
PARTITIONS = {
    "one process, many microbatches": (None, 1, MANY_MICROBATCHES),
    "ddp, two ranks": ("ddp", 2, MANY_MICROBATCHES),
    "zero3, two ranks, many microbatches, checkpointing": ("zero3", 2, MANY_MICROBATCHES, "checkpointing"),
}


def gradients(model: Path, out: Path, critic: str, launcher: str | None, ranks: int, budget: int, *flags: str) -> dict:
    launch = accelerate(launcher, ranks) if launcher else ()
    done = run_ranks(launch, WORKER, model, out, critic, budget, *flags, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    with np.load(out) as arrays:
        return dict(arrays) | {f"saved {name}": tensor for name, tensor in load_file(saved_critic(out)).items()}


def saved_critic(out: Path) -> Path:
    return out.with_suffix("") / "model.safetensors"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings: one parameter in the policy, and a copy in the critic."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module", params=["separate", "shared", "vapo"])
def reference(request, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    out = tmp_path_factory.mktemp("reference") / "gradients.npz"
    return request.param, gradients(tiny_model, out, request.param, None, 1, ONE_MICROBATCH, "apart")


@pytest.mark.distributed
@pytest.mark.parametrize("partition", PARTITIONS)
def test_gradients_of_policy_and_critic_do_not_depend_on_the_partition(
    partition: str, reference: tuple[str, dict], tiny_model: Path, tmp_path: Path
) -> None:
    critic, expected = reference
    found = gradients(tiny_model, tmp_path / "gradients.npz", critic, *PARTITIONS[partition])
    assert found.keys() == expected.keys()
    assert found["layer_runs_per_pack"] == 1 + ("checkpointing" in PARTITIONS[partition])
    for part in ("policy.", "critic."):
        names = [name for name in expected if name.startswith(part)]
        whole = np.concatenate([expected[name].ravel() for name in names])
        own = np.concatenate([found[name].ravel() for name in names])
        assert np.linalg.norm(whole) > 1e-4, f"{part} has no gradient, so nothing is compared"
        assert np.linalg.norm(own - whole) / np.linalg.norm(whole) < 1e-5, part
    for name in (name for name in expected if name.startswith("saved ")):
        np.testing.assert_allclose(found[name], expected[name], err_msg=f"the critic on disk: {name}")
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "gradients").config.num_labels == 1
    for name in ("scored", "values", "ppo/value/loss", "ppo/value/clip_frac", "ppo/policy/approxkl", "policy/loss"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
