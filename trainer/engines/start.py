"""Start of embedded engines; connections to servers are in `servers.py`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep.rollout.engine.arguments import engine_arguments, engine_variables
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import SyncedEngine
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import print_error
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.named_models import refuse_unfit_models
from lockstep.trainer.model.lora import adapter_settings
from lockstep.trainer.model.memory_plan import cache_gib


def start_engine(config: Config, *, loop: BackgroundLoop, log_path: Path) -> EnginePool:
    """Start or connect to the engines of a process that is not a rank of a run (those: run_engines.py).

    Raises `EngineError` if vLLM does not start (with the end of its log), or a server cannot be reached; `ConfigError`
    with `model.lora.path`, which such a process does not read.
    """
    if (path := config.model.lora.path) is not None:
        raise ConfigError(
            f"model.lora.path={path} is an adapter to train further; to sample with it set 'model.adapters={{trained: "
            f"{path}}}' without model.lora.path"
        )
    if config.rollout.engine != "server":  # else the files may be on its machine alone
        refuse_unfit_models(config, print_error, trains=False)
    return EnginePool(start_members(config, loop=loop, log_path=log_path))


def start_members(config: Config, *, loop: BackgroundLoop, log_path: Path, **memory: Any) -> Sequence[SyncedEngine]:
    """Start or connect to the members of a pool. memory: `EngineSettings` of the only one."""
    if config.rollout.engine == "server":
        from lockstep.trainer.engines.servers import connect_servers  # other runs do not load its client

        return connect_servers(config, loop=loop)
    number = config.rollout.num_engines
    if number == 1:
        return [EmbeddedEngine(engine_settings(config, **memory), loop=loop, log_path=log_path)]
    check_cores(number)
    paths = [log_path, *(log_path.with_stem(f"{log_path.stem}-{index}") for index in range(1, number))]
    return [
        EmbeddedEngine(
            engine_settings(config, local_place=(index, number)),
            loop=loop,
            log_path=path,
            name=f"embedded engine {index}",
        )
        for index, path in enumerate(paths)
    ]


@contextmanager
def open_engine(config: Config) -> Iterator[EnginePool]:
    """Start the engine, with a temporary log, and close it after the block."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as logs, BackgroundLoop() as loop:
        engine = start_engine(config, loop=loop, log_path=Path(logs) / "engine.log")
        try:
            yield engine
        finally:
            loop.run(engine.close())


def check_engine(settings: EngineSettings) -> None:
    """Raise `ConfigError` for settings with which no embedded engine would start, without starting one."""
    is_cpu = not torch.cuda.is_available()
    engine_arguments(settings, is_cpu=is_cpu)
    engine_variables(settings, is_cpu=is_cpu)


def check_cores(num_engines: int) -> None:
    """Raise `ConfigError` if embedded engines would have less than a core each, or would share a GPU."""
    if torch.cuda.is_available():
        raise ConfigError(
            f"rollout.num_engines={num_engines} shares out the cores of a CPU, and this machine samples on its GPU; "
            "set rollout.num_engines=1, or rollout=colocated for an engine on every GPU"
        )
    cores = len(os.sched_getaffinity(0))
    if num_engines > cores:
        raise ConfigError(
            f"rollout.num_engines={num_engines} needs as many cores, and this process has {cores}; set "
            f"rollout.num_engines={cores} or less"
        )


def engine_settings(config: Config, **placed: Any) -> EngineSettings:
    """Return the settings of an engine of this configuration. placed: values that override it."""
    settings = config.rollout
    values: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": settings.max_model_len,
        "context": config.engine_context,
        "quantization": settings.quantization,
        "adapters": adapter_settings(config.model, settings, correction_mode=config.correction.mode),
        "return_routes": config.plan.replays_engine,
        "batch_invariant": settings.batch_invariant,
        "seed": config.seed,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_gib": cache_gib(config.rollout),
        "compile_on_cpu": settings.compile_engine,
        # CUDA IPC hands weights to an engine on the trainer's own GPU; gloo is the transport between CPU processes.
        "weight_transfer_backend": "cuda_ipc" if torch.cuda.is_available() else "gloo",
        "request_timeout_s": settings.request_timeout_s,
        "start_timeout_s": settings.start_timeout_s,
    }
    return EngineSettings(**(values | placed))
