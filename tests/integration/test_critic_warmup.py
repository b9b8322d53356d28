"""After a warm-up of the critic the policy's first update is that of a run without one, also where ranks share Adam."""

from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.models import save_tiny_model
from tests.fixtures.ranks import accelerate, run_ranks

WORKER = Path(__file__).parent / "workers" / "critic_warmup.py"


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", [None, "ddp", "zero2", "zero3"])
def test_adam_does_not_count_the_updates_of_the_critic_alone_for_the_policy(
    launcher: str | None, tmp_path: Path
) -> None:
    model, out = save_tiny_model(tmp_path / "model", tied=True), tmp_path / "moved.npz"
    done = run_ranks(accelerate(launcher) if launcher else (), WORKER, model, out, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    with np.load(out) as found:
        without, after = found["after 0"], found["after 6"]
    assert np.abs(without).max() > 5e-4
    np.testing.assert_allclose(after, without, atol=2e-6)
