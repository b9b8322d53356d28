"""The head's Triton kernels equal the definition in float64, pass over logits once, and compile for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures import fake_gpu
from tests.fixtures.paths import ROOT
from tests.integration.workers.head_kernels import CASES, E

triton = pytest.importorskip("triton", reason="Triton is a part of torch's builds for Linux on x86")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if (reason := fake_gpu.missing()) is not None:
        pytest.skip(reason)
    output = tmp_path_factory.mktemp("head_kernels") / "measured.json"
    command = [sys.executable, "-m", "tests.integration.workers.head_kernels", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert output.exists(), done.stderr[-3000:]
    return {case["name"]: case for case in json.loads(output.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_the_interpreted_kernels(measured: dict[str, dict[str, Any]], name: str) -> None:
    case = measured[name]
    is_half = case["dtype"] == "bfloat16"
    assert max(case["differences"].values()) <= 1e-5, case["differences"]
    assert max(case["gradients"].values()) <= (1e-2 if is_half else 2e-6), case["gradients"]
    assert case["masked"] == 0, "tokens without a gradient"
    assert case["syncs"] == [case["support"], 0], case["lines"]
    if is_half:
        assert case["products"] == ["bfloat16"]
    if case["support"]:
        assert case["passes"] == [{}, {}], "the logits of a support are no tile"
        return
    forward, backward = case["passes"]
    # A bias is loaded for each row again; it stays in a GPU's cache.
    assert forward["load"] == backward["load"] == 1 + case["bias"]
    assert "store" not in forward
    assert backward["store"] == (0.5 if is_half else 1)
    # Numbers per token and tile, of which a candidate has some; tiles are 32 times wider on a GPU than here.
    for beside in (forward["load beside"] + forward["store beside"], backward["load beside"]):
        assert beside <= 0.12 + 0.06 * E * case["candidates"]


@pytest.mark.parametrize("is_full", [False, True])
def test_the_kernels_compile_for_a_gpu(is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter accepts more than the compiler does, and does not show how a thread reads memory."""
    import torch
    from triton.backends.compiler import GPUTarget

    from lockstep.trainer.model.head import logit_kernels
    from lockstep.trainer.model.head.logit_tiles import Gradients, LogitTiles, LogitTransform, Sums

    hopper = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", hopper)
    programs = {}
    for name in ("_statistics", "_gradient"):
        monkeypatch.setattr(logit_kernels, name, _Compiling(getattr(logit_kernels, name), name, programs))
    tokens, vocabulary = 4, 4096
    transform = LogitTransform(softcap=30.0 if is_full else None)
    bias_V = torch.zeros(vocabulary) if is_full else None
    tiles = LogitTiles(torch.zeros(tokens, 16), torch.zeros(vocabulary, 16), bias_V, transform, None)
    tiles.operand_dtype = torch.bfloat16
    target_ids, ids = torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, 20, dtype=torch.int64)
    candidate_ids = ids if is_full else None
    products, numbers = torch.zeros(tokens, vocabulary), torch.zeros(5, tokens)
    sums = Sums.zeros(target_ids, candidate_ids, torch.float32)
    logit_kernels.statistics(tiles, tiles.tiles[0], products, sums, with_entropy=is_full)
    rows = Gradients(
        target_ids_N=target_ids,
        candidate_ids_NE=candidate_ids,
        lse_N=numbers[0],
        entropy_N=numbers[1],
        common_N=numbers[2],
        grad_logprob_N=numbers[3],
        grad_entropy_N=numbers[4] if is_full else None,
        candidate_dz_NE=torch.zeros(tokens, 20) if is_full else None,
    )
    logit_kernels.gradient(tiles, tiles.tiles[0], products, rows)
    assert set(programs) == {"_statistics", "_gradient"}
    assert all(program["cubin"] for program in programs.values())
    assert all("ld.global.v4.b32" in program["ptx"] for program in programs.values()), "16 bytes at a time"
    assert "st.global.v4.b32" in programs["_gradient"]["ptx"]


class _Compiling:
    """A kernel that is compiled for its arguments and not launched."""

    def __init__(self, kernel: Any, name: str, programs: dict[str, Any]) -> None:
        self.kernel, self.name, self.programs = kernel, name, programs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compiled(*args: Any, **kwargs: Any) -> None:
            self.programs[self.name] = self.kernel.warmup(*args, grid=grid, **kwargs).asm

        return compiled
