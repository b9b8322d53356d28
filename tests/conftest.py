"""Set up all tests.

* Property tests draw the same examples in every run; HYPOTHESIS_PROFILE=explore draws others.
* Tests that start engines or ranks are skipped where torch sees a GPU: their numeric bounds and shares of memory are
  those of CPU engines, several at once. `make gpu-check` (docs/gpu.md) checks those paths on GPUs.
* No test asks the hub: where it cannot be reached, each question is repeated for half a minute.
* Beside other workers (`pytest -n`) a test computes in one thread: threads of several workers that spin while they wait
  for each other make small models four times slower.
"""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Time on a busy machine says nothing: by default slow drawing fails a test, too."""
settings.register_profile("repeat", UNTIMED, derandomize=True)
settings.register_profile("explore", UNTIMED, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":  # set by tests/fixtures/v2_on_cpu
        for item in items:
            if marker := item.get_closest_marker("v1"):
                item.add_marker(pytest.mark.skip(reason=marker.args[0]))
    if not torch.cuda.is_available():
        return
    on_cpu = pytest.mark.skip(reason="starts CPU engines or ranks; run `make gpu-check` on machines with a GPU")
    for item in items:
        if item.get_closest_marker("engine") or item.get_closest_marker("distributed"):
            item.add_marker(on_cpu)
