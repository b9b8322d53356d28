"""The head's Triton kernels equal the definition in float64, pass over logits once, and compile for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
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
@pytest.mark.parametrize("name", ["_statistics", "_gradient"])
def test_the_kernels_compile_for_a_gpu(
    name: str, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts more than the compiler does, and does not show how a thread reads memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lockstep.trainer.model.head import logit_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(logit_kernels, name)
    optional = "*fp32" if is_full else "constexpr"
    last = ("*fp32", optional) if name == "_statistics" else (optional, optional)
    types: dict[str, Any] = {
        "z_ptr": "*fp32", "dz_ptr": "*bf16", "bias_ptr": optional, "ids": ("*i64", "*i64" if is_full else "constexpr"),
        "numbers": ("*fp32",) * 4 + last, "window": ("i32", "i32", "fp32", "fp32"),
    }  # fmt: skip
    constants: dict[str, Any] = {
        "WITH_ENTROPY": is_full, "HAS_SOFTCAP": is_full, "NUM_CANDIDATES": 20 if is_full else 0,
        "CANDIDATE_BLOCK": 32 if is_full else 1, "BLOCK": logit_kernels.BLOCK,
    }  # fmt: skip
    signature = {one: types.get(one, "constexpr") for one in kernel.arg_names}
    values: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    for index, (argument, kinds) in enumerate(signature.items()):
        for place, kind in enumerate(kinds) if isinstance(kinds, tuple) else [(None, kinds)]:
            path = (index,) if place is None else (index, place)
            if kind == "constexpr":
                values[path] = constants.get(argument)  # None for a pointer that is not given
            elif kind != "fp32":
                aligned[path] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": logit_kernels.WARPS})
    assert compiled.asm["cubin"]
    assert "ld.global.v4.b32" in compiled.asm["ptx"], "16 bytes at a time"
    if name == "_gradient":
        assert "st.global.v4.b32" in compiled.asm["ptx"]
