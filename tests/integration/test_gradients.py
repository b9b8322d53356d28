"""One batch gives one gradient, however the trainer partitions it.

Plain, DDP, ZeRO-2 and ZeRO-3; one, two and three ranks; one microbatch and many; with and without gradient
checkpointing; rollouts that are branched into rows on different ranks; shared prefixes against a reference without
them; a mixture of experts with losses about its routers; a hybrid with recurrent layers. Compared are gradients, not
losses, because one denominator holds for an optimizer step.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.families import save_family
from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, run_ranks

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "gradients.py"
# Presets with a critic: test_ppo_gradients.py; SFT, which has no rollouts: test_component_gradients.py
PRESETS = sorted(
    file.stem
    for file in (ROOT / "configs" / "algorithm").glob("*.yaml")
    if "advantage: gae" not in file.read_text() and file.stem != "sft"
)
ONE_MICROBATCH, MANY_MICROBATCHES = 100_000, 96

PARTITIONS = {
    "one process, many microbatches, checkpointing": (None, 1, MANY_MICROBATCHES, "checkpointing"),
    "ddp, two ranks": ("ddp", 2, ONE_MICROBATCH),
    "zero2, two ranks, many microbatches": ("zero2", 2, MANY_MICROBATCHES),
    "zero3, two ranks, checkpointing": ("zero3", 2, ONE_MICROBATCH, "checkpointing"),
    "zero3, three ranks, many microbatches": ("zero3", 3, MANY_MICROBATCHES),
}


MIXTURE_PARTITIONS = [name for name in PARTITIONS if not name.startswith("zero3, three")]


def gradients(
    model: Path, out: Path, launcher: str | None, ranks: int, token_budget: int, *flags: str, presets: list[str]
) -> dict[str, np.ndarray]:
    done = run_ranks(
        accelerate(launcher, ranks) if launcher else (),
        *(WORKER, model, out, ",".join(presets), token_budget, *flags),
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    with np.load(out) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied embeddings: one partitioned parameter gets the gradients of head and embedding."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("reference") / "gradients.npz"
    return gradients(tiny_model, out, None, 1, ONE_MICROBATCH, "apart", presets=PRESETS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    return save_family("qwen3_moe", tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def mixture_reference(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("mixture_reference") / "gradients.npz"
    return gradients(mixture, out, None, 1, ONE_MICROBATCH, "apart", "experts", presets=["grpo"])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent layers and experts, whose rows share no prefixes."""
    return save_family("qwen3_next", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def hybrid_reference(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Gradients with one row per pack, in which nothing can leak."""
    out = tmp_path_factory.mktemp("hybrid_reference") / "gradients.npz"
    return gradients(hybrid, out, None, 1, 1, "apart", presets=["grpo"])


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12))


def compare(
    found: dict[str, np.ndarray],
    reference: dict[str, np.ndarray],
    presets: list[str],
    *,
    tolerance: float,
    shares_prefixes: bool = True,
) -> None:
    """Compare the gradients of each preset as one vector."""
    assert found.keys() == reference.keys()
    for preset in presets:
        names = [name for name in reference if name.startswith(f"{preset}/")]
        whole = np.concatenate([reference[name].ravel() for name in names])
        assert np.linalg.norm(whole) > 1e-4, f"{preset} has no gradient, so nothing is compared"
        error = relative_error(np.concatenate([found[name].ravel() for name in names]), whole)
        assert error < tolerance, f"{preset}: relative error {error:.1e} of the gradient"
    assert reference["shared_tokens_frac"] == 0
    assert (found["shared_tokens_frac"] > 0.05) == shares_prefixes
    np.testing.assert_allclose(found["policy/scored"], reference["policy/scored"], atol=1e-5)
    np.testing.assert_allclose(found["reference/scored"], reference["policy/scored"], atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "partition",
    # test_ppo_gradients.py has ZeRO-3 with many microbatches on two ranks
    [pytest.param(name, marks=[pytest.mark.slow] if "three ranks" in name else []) for name in PARTITIONS],
)
def test_the_gradient_does_not_depend_on_the_partition(
    partition: str, reference: dict[str, np.ndarray], tiny_model: Path, tmp_path: Path
) -> None:
    _, ranks, *_ = PARTITIONS[partition]
    tolerance = 2e-6 if ranks == 3 else 1e-6  # thirds are not exact: the mean over ranks, times three, rounds
    found = gradients(tiny_model, tmp_path / "gradients.npz", *PARTITIONS[partition], presets=PRESETS)
    compare(found, reference, PRESETS, tolerance=tolerance)
    recomputes = "checkpointing" in PARTITIONS[partition]
    assert found["layer_runs_per_pack"] == 1 + recomputes, "in eval mode transformers checkpoints nothing, silently"


@pytest.mark.distributed
@pytest.mark.parametrize("partition", MIXTURE_PARTITIONS)
def test_the_gradient_of_router_losses_does_not_depend_on_the_partition(
    partition: str, mixture_reference: dict[str, np.ndarray], mixture: Path, tmp_path: Path
) -> None:
    out = tmp_path / "gradients.npz"
    found = gradients(mixture, out, *PARTITIONS[partition], "experts", presets=["grpo"])
    compare(found, mixture_reference, ["grpo"], tolerance=2e-6)
    metrics = [name for name in mixture_reference if name.startswith("metrics/router/")]
    assert "metrics/router/aux_loss" in metrics
    for name in metrics:
        np.testing.assert_allclose(found[name], mixture_reference[name], rtol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("partition", MIXTURE_PARTITIONS)
def test_the_gradient_of_a_hybrid_does_not_depend_on_the_partition(
    partition: str, hybrid_reference: dict[str, np.ndarray], hybrid: Path, tmp_path: Path
) -> None:
    found = gradients(hybrid, tmp_path / "gradients.npz", *PARTITIONS[partition], presets=["grpo"])
    compare(found, hybrid_reference, ["grpo"], tolerance=2e-6, shares_prefixes=False)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ddp", "zero2", "zero3"])
def test_gradients_summed_in_bfloat16_are_rounded_once(
    launcher: str, reference: dict[str, np.ndarray], tiny_model: Path, tmp_path: Path
) -> None:
    found = gradients(tiny_model, tmp_path / "gradients.npz", launcher, 2, ONE_MICROBATCH, "rounded", presets=["grpo"])
    names = [name for name in reference if name.startswith("grpo/")]
    whole = np.concatenate([reference[name].ravel() for name in names])
    error = relative_error(np.concatenate([found[name].ravel() for name in names]), whole)
    assert 1e-4 < error < 5e-3, f"relative error {error:.1e} of the gradient; bfloat16 rounds to 2^-9"
