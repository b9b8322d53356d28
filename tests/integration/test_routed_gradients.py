"""One batch with given routes has one gradient, and one record of routes, however the trainer partitions it.

The reference is one process with rows apart, which tests/unit/trainer/model/layers/test_routing.py compares with a
computation by hand.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.families import save_family
from tests.fixtures.ranks import accelerate, run_ranks

pytestmark = pytest.mark.timeout(300)

WORKER = Path(__file__).parent / "workers" / "routed_gradients.py"
ONE_MICROBATCH, MANY_MICROBATCHES = 100_000, 96
PARTITIONS = {
    "one process, many microbatches, checkpointing": (None, MANY_MICROBATCHES, "checkpointing"),
    "ddp, two ranks": ("ddp", ONE_MICROBATCH),
    "zero3, two ranks, checkpointing": ("zero3", MANY_MICROBATCHES, "checkpointing"),
}


def gradients(model: Path, out: Path, launcher: str | None, token_budget: int, *flags: str) -> dict[str, np.ndarray]:
    done = run_ranks(
        accelerate(launcher) if launcher else (), *(WORKER, model, out, token_budget, *flags), timeout_s=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    with np.load(out) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return gradients(model, tmp_path_factory.mktemp("reference") / "gradients.npz", None, ONE_MICROBATCH, "apart")


@pytest.mark.distributed
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_gradient_with_given_routes_does_not_depend_on_the_partition(
    partition: str, reference: dict[str, np.ndarray], model: Path, tmp_path: Path
) -> None:
    found = gradients(model, tmp_path / "gradients.npz", *PARTITIONS[partition])
    assert found.keys() == reference.keys()
    names = [name for name in reference if name.startswith("gradient/")]
    gates = [name for name in names if name.endswith("mlp.gate.weight")]
    for chosen in (names, gates):
        expected = np.concatenate([reference[name].ravel() for name in chosen])
        difference = np.concatenate([found[name].ravel() for name in chosen]) - expected
        assert np.linalg.norm(expected) > 1e-4, "no gradient, so nothing is compared"
        assert np.linalg.norm(difference) / np.linalg.norm(expected) < 5e-6
    assert np.array_equal(found["recorded"], reference["recorded"])
    for name in ("own", "scored", "reference"):
        np.testing.assert_allclose(found[name], reference[name], atol=1e-5)
    np.testing.assert_allclose(found["reference"], found["own"], atol=1e-5)
    assert np.abs(found["scored"] - found["own"]).max() > 0.1, "the given routes change nothing"
