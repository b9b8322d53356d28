"""DeepSpeed's loader, which unpickles by default, loads weights only under Lockstep."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.forked_python import forked_python

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_loads_its_checkpoint_and_no_pickle_bomb(tmp_path, stage):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = [forked_python(), "-m", "tests.integration.workers.deepspeed_bomb", str(stage), str(tmp_path), str(port)]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(worker, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240)
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results == ["loaded True", "refused UnpicklingError", "refused UnpicklingError"], done.stderr[-2000:]
    assert not (tmp_path / "fired").exists()
