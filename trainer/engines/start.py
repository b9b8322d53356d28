"""Start of embedded engines; connections to servers are in `servers.py`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.rollout.engine.arguments import engine_arguments, engine_variables
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import print_error
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.named_models import refuse_unfit_models
from lockstep.trainer.model.memory_plan import cache_gib

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing


def start_engine(
    config: Config, *, loop: BackgroundLoop, log_path: Path, images: ImageProcessing | None = None
) -> EnginePool:
    """Start or connect to the engines of a process that is not a rank of a run (those: run_engines.py).

    images: of prompts; those of the chat.

    Raises `EngineError` if vLLM does not start (with the end of its log), or a server cannot be reached; `ConfigError`
    with `model.lora.path`, which such a process does not read.
    """
    if (path := config.model.lora.path) is not None:
        raise ConfigError(
            f"model.lora.path={path} is an adapter to train further; to sample with it set 'model.adapters={{trained: "
            f"{path}}}' without model.lora.path"
        )
    rollout, context = config.rollout, config.engine_context
    if rollout.engine == "server":  # the model's files may be on its machine alone
        from lockstep.trainer.engines.servers import Connector  # other runs do not load its client

        needs_routes = config.plan.replays_engine
        connector = Connector(
            config.model, rollout, context=context, needs_routes=needs_routes, loop=loop, images=images
        )
        return EnginePool(connector.connect_all(), patience_s=rollout.pool_timeout_s)
    refuse_unfit_models(config, print_error, trains=False)
    settings = engine_settings(config.model, rollout, config.correction, seed=config.seed, context=context)
    return EnginePool(start_embedded(settings, rollout.num_engines, loop=loop, log_path=log_path, images=images))


def start_embedded(
    settings: EngineSettings,
    number: int,
    *,
    loop: BackgroundLoop,
    log_path: Path,
    images: ImageProcessing | None = None,
) -> list[EmbeddedEngine]:
    """Start the engines of a pool, which share the cores if there are several. images: of prompts."""
    if number == 1:
        return [EmbeddedEngine(settings, loop=loop, log_path=log_path, images=images)]
    check_cores(number)
    paths = [log_path, *(log_path.with_stem(f"{log_path.stem}-{index}") for index in range(1, number))]
    return [
        EmbeddedEngine(
            replace(settings, local_place=(index, number)),
            loop=loop,
            log_path=path,
            name=f"embedded engine {index}",
            images=images,
        )
        for index, path in enumerate(paths)
    ]


@contextmanager
def open_engine(config: Config, images: ImageProcessing | None = None) -> Iterator[EnginePool]:
    """Start the engine, with a temporary log, and close it after the block. images: as in `start_engine`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as logs, BackgroundLoop() as loop:
        engine = start_engine(config, loop=loop, log_path=Path(logs) / "engine.log", images=images)
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


def engine_settings(
    model: ModelConfig, rollout: RolloutConfig, correction: CorrectionConfig, *, seed: int, context: int
) -> EngineSettings:
    """Return the settings of an engine that samples for a run. context: `Config.engine_context`."""
    adapters = None
    if model.lora.rank or model.adapters or rollout.quantization is not None:
        from lockstep.trainer.model.lora import adapter_settings  # engines without adapters do not load it

        adapters = adapter_settings(model, rollout, correction_mode=correction.mode)
    return EngineSettings(
        model=model.path,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        max_model_len=rollout.max_model_len,
        context=context,
        quantization=rollout.quantization,
        adapters=adapters,
        return_routes=correction.routing_replay == "engine",
        batch_invariant=rollout.batch_invariant,
        num_threads=rollout.num_threads,
        seed=seed,
        max_images=model.images.max_per_prompt,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_gib=cache_gib(rollout),
        compile_on_cpu=rollout.compile_engine,
        # CUDA IPC hands weights to an engine on the trainer's own GPU; gloo is the transport between CPU processes.
        weight_transfer_backend="cuda_ipc" if torch.cuda.is_available() else "gloo",
        request_timeout_s=rollout.request_timeout_s,
        start_timeout_s=rollout.start_timeout_s,
    )
