"""Check of drivers, libraries, allocator and free memory."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path

import torch
from torch.cuda import nccl

from lockstep.rollout.errors import ConfigError
from lockstep.scripts.gpu_checks.measured import Measured, above, equal
from lockstep.scripts.gpu_checks.subject import Subject
from lockstep.trainer.engines.run_engines import check_allocator

DRIVER, NCCL = 580, (2, 29, 7)
"""Least driver for CUDA 13, and least NCCL that vLLM's transfer between processes accepts."""


def environment(subject: Subject) -> list[Measured]:
    measurements = [
        equal("build of torch for", (torch.version.cuda or "CPU").partition(".")[0], subject.pick("13", "CPU")),
        equal("kernels of vLLM", _imported(_kernels(subject.device)), "loaded"),
        equal("allocator of torch", _allocator(), "shares memory"),
    ]
    if subject.rehearses:
        return [*measurements, above("free memory, GiB", _free_main_memory() / 2**30, 1)]
    free = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    found_nccl = nccl.version()
    return [
        *measurements,
        above("driver", int(driver.partition(".")[0]), DRIVER - 1),
        equal(f"NCCL {'.'.join(map(str, found_nccl))}", "enough" if found_nccl >= NCCL else "too old", "enough"),
        above("free share of GPU memory, least", min(now / total for now, total in free), 0.9),
    ]


def _kernels(device: str) -> str:
    """Return vLLM's module of kernels for this device. For a CPU it has three builds; others end the process."""
    if device == "cuda":
        return "vllm._C_stable_libtorch"
    if not torch.cpu._is_avx512_supported():
        return "vllm._C_AVX2"
    return "vllm._C" if torch.cpu._is_avx512_bf16_supported() else "vllm._C_AVX512"


def _imported(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        # vLLM's builds for other CPUs have the name of the first one inside, after whose load Python refuses it.
        return "loaded" if "does not define module export function" in str(error) else str(error)
    return "loaded"


def _allocator() -> str:
    try:
        check_allocator(os.environ)
    except ConfigError as error:
        return str(error)
    return "shares memory"


def _free_main_memory() -> int:
    """Return the available main memory in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
