"""A real vLLM server of one model on CPU cores, by the command for users."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from harness.workloads import ROOT

CONTEXT, KV_CACHE_GIB = 512, 0.5
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
"""One thread per engine on any core; vLLM would pin both engines to the first."""


@contextmanager
def server(model: Path, key: str, log_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server by scripts/serve_engine.py; yield its address and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [f"model.path={model}", f"server.port={port}", f"rollout.max_model_len={CONTEXT}"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "scripts/serve_engine.py", *settings, f"rollout.kv_cache_gib={KV_CACHE_GIB}"],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "LOCKSTEP_ENGINE_KEY": key},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
