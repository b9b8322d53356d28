"""Worker of `test_engine_processes.py`: starts an engine, prints the pids of its processes, samples on request."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.system.background_loop import BackgroundLoop
from tests.fixtures.models import save_tiny_model


def main(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a trainer that finishes its update on Ctrl-C
    loop = BackgroundLoop()
    engine = EmbeddedEngine(
        EngineSettings(
            model=save_tiny_model(directory / "model", tied=True), max_model_len=64, kv_cache_gib=0.0625, num_threads=1
        ),
        loop=loop,
        log_path=directory / "engine.log",
    )
    print("ready", flush=True)
    for _ in sys.stdin:
        call = loop.run(engine.generate((5, 6, 7), Sampling(max_tokens=4, ignore_eos=True, seed=0)))
        print(len(call.sampled_ids), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
