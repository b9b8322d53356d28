"""torchvision and torchaudio for CUDA beside torch for the CPU: what makes transformers import all the same."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cuda_builds

FAKE = """
import torch
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return scores
"""
WITHOUT = "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != 'Preparations']\n"


def imported(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A torchvision whose compiled part does not load here."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(FAKE)
    (tmp_path / "torchvision/_C.so").write_bytes(b"built for something else")
    return tmp_path


def test_operators_that_do_not_load_are_defined(foreign: Path) -> None:
    refused = imported(foreign, f"{WITHOUT}import torchvision")
    assert "operator torchvision::nms does not exist" in refused.stderr
    done = imported(
        foreign, "import lockstep, torchvision, torch\nprint(torchvision.__file__, torch.ops.torchvision.nms)"
    )
    assert done.stdout.startswith(str(foreign)), done.stderr


def test_operators_that_load_stay_alone(foreign: Path) -> None:
    (foreign / "torchvision/_C.so").unlink()
    refused = imported(foreign, "import lockstep, torchvision")
    assert "operator torchvision::nms does not exist" in refused.stderr


@pytest.mark.parametrize(
    ("torch", "torchaudio", "loads"),
    [("2.13.0+cpu", "2.11.1", False), ("2.13.0+cpu", "2.11.1+cpu", True), ("2.13.0", "2.11.1", True)],
)
def test_only_a_build_for_cuda_beside_the_cpu_is_hidden(
    torch: str, torchaudio: str, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"torch": torch, "torchaudio": torchaudio}.__getitem__)
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # restored afterwards
    del sys.modules["torchaudio"]
    cuda_builds.Preparations().find_spec("transformers")
    assert ("torchaudio" not in sys.modules) == loads
    assert loads or importlib.util.find_spec("torchaudio") is None


def test_transformers_before_lockstep_imports_image_processors() -> None:
    pytest.importorskip("torchvision")
    done = imported(Path(), "from transformers import Qwen2VLImageProcessor\nprint(Qwen2VLImageProcessor.__module__)")
    assert done.returncode == 0, done.stderr


def test_an_engine_process_is_prepared_before_it_imports_transformers() -> None:
    """vLLM imports transformers while its configuration is unpickled, before it loads general plugins."""
    program = (
        f"{WITHOUT}import vllm.config\nprint(any(type(each).__name__ == 'Preparations' for each in sys.meta_path))"
    )
    done = imported(Path(), program)
    assert done.stdout.endswith("True\n"), done.stderr
