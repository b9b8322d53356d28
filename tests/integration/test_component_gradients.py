"""The gradient of several components does not depend on ranks, microbatches and packs: rollouts with demonstrations.

Each component has its own denominator over all ranks, and a rank may hold no row of one of them.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.families import save_family
from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, run_ranks

WORKER = Path(__file__).parent / "workers" / "component_gradients.py"
WHOLE, MANY, ROW_EACH = 100_000, 96, 1
PARTITIONS = {
    "one process, many microbatches": (None, 1, MANY),
    "one process, a row per pack": (None, 1, ROW_EACH),
    "ddp, two ranks": ("ddp", 2, WHOLE),
    "zero3, two ranks": ("zero3", 2, WHOLE),
    "zero3, two ranks, many microbatches": ("zero3", 2, MANY),
    "zero3, three ranks, a row per pack": ("zero3", 3, ROW_EACH),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module", params=["mixed", "alone", "mixed taught", "alone taught"])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(case: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return gradients(model, tmp_path_factory.mktemp("reference") / "gradients.npz", None, 1, WHOLE, case)


def gradients(
    model: Path, out: Path, launcher: str | None, ranks: int, token_budget: int, case: str
) -> dict[str, np.ndarray]:
    command = accelerate(launcher, ranks) if launcher else ()
    done = run_ranks(command, WORKER, model, out, token_budget, *case.split(), timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    with np.load(out) as arrays:
        return dict(arrays)


@pytest.mark.distributed
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_gradient_of_components_does_not_depend_on_the_partition(
    partition: str, case: str, reference: dict[str, np.ndarray], model: Path, tmp_path: Path
) -> None:
    found = gradients(model, tmp_path / "gradients.npz", *PARTITIONS[partition], case)
    check_equal(found, reference)
    assert ("metrics/loss/policy" in reference) == case.startswith("mixed")
    assert ("metrics/loss/demonstrations_teacher" in reference) == case.endswith("taught")


@pytest.mark.distributed
@pytest.mark.parametrize("demonstrations", ["mixed", "alone"])
@pytest.mark.parametrize("kind", ["lora", "experts"])
def test_the_gradient_of_adapters_and_of_experts_does_not_depend_on_the_partition(
    kind: str, demonstrations: str, model: Path, tmp_path: Path
) -> None:
    """With a divergence from a teacher on the demonstrations."""
    case, path = f"{demonstrations} taught {kind}", model if kind == "lora" else save_family("qwen3_moe", tmp_path)
    reference = gradients(path, tmp_path / "reference.npz", None, 1, WHOLE, case)
    assert any(("lora_B" if kind == "lora" else "experts") in name for name in reference)
    for partition in ("one process, a row per pack", "ddp, two ranks", "zero3, two ranks, many microbatches"):
        check_equal(gradients(path, tmp_path / "found.npz", *PARTITIONS[partition], case), reference)


def check_equal(found: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    """Compare gradients, as a vector, and metrics."""
    assert found.keys() == reference.keys()
    names = [name for name in reference if not name.startswith("metrics/") and name != "microbatches"]
    expected = np.concatenate([reference[name].ravel() for name in names])
    difference = np.concatenate([found[name].ravel() for name in names]) - expected
    assert np.linalg.norm(expected) > 1e-4
    assert np.linalg.norm(difference) / np.linalg.norm(expected) < 1e-5
    for name in (name for name in reference if name.startswith("metrics/")):
        np.testing.assert_allclose(found[name], reference[name], rtol=1e-5)
