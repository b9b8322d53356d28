"""Start of embedded engines, and connections to servers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from lockstep.rollout.engine.adapters import buffer_rank
from lockstep.rollout.engine.arguments import engine_arguments, engine_variables
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.engine.protocol import SyncedEngine
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.safe_text import print_error
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.named_models import refuse_unfit_models
from lockstep.trainer.model.layers.rotary import LONGROPE, original_lengths
from lockstep.trainer.model.lora import adapter_settings
from lockstep.trainer.model.memory_plan import cache_gib
from lockstep.trainer.model.quantized_base import stored_method
from lockstep.trainer.setting import typed


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


def check_engine(config: Config) -> None:
    """Raise `ConfigError` for settings with which no engine would start, without starting one."""
    settings, is_cpu = engine_settings(config), not torch.cuda.is_available()
    if config.rollout.engine != "server":
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


def connect_servers(config: Config, *, loop: BackgroundLoop) -> list[ServerEngine]:
    settings = config.rollout
    model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    engines = [
        ServerEngine(
            url,
            loop=loop,
            vocab_size=model.get_text_config().vocab_size,
            api_key=engine_key(settings.api_key_env),
            request_timeout_s=settings.request_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            silence_timeout_s=settings.silence_timeout_s,
        )
        for url in settings.urls
    ]
    for engine in engines:
        dtype = str(engine.dtype).removeprefix("torch.")
        if dtype != config.model.dtype:
            raise ConfigError(
                f"{engine.name} computes in {dtype}, the trainer in {config.model.dtype}; restart it with "
                f"--dtype {config.model.dtype}, or set model.dtype={dtype}"
            )
        if engine.context < config.engine_context:
            fitting = settings.max_model_len - config.engine_context + engine.context
            raise ConfigError(
                f"{engine.name} has a context of {engine.context} tokens, expected {config.engine_context}; "
                f"restart it with --max-model-len {config.engine_context}, or set rollout.max_model_len={fitting}"
            )
        original = original_lengths(model).get(LONGROPE)
        if original is not None and config.engine_context <= original < engine.context:
            raise ConfigError(
                f"{engine.name} has a context of {engine.context} tokens, so it uses the long factors of the model's "
                f"longrope positions, and the run with rollout.max_model_len={settings.max_model_len} the short ones; "
                f"restart it with --max-model-len {config.engine_context}"
            )
        if config.replays_engine and not engine.returns_routes:
            raise ConfigError(
                f"{engine.name} returns no routed experts; restart it with --enable-return-routed-experts, or set "
                "correction.routing_replay=off"
            )
        check_adapters(engine, config)
        check_quantization(engine, config, stored=stored_method(model))
        engine.max_model_len = settings.max_model_len
    return engines


def check_adapters(engine: ServerEngine, config: Config) -> None:
    """Raise `ConfigError` if a server was started for adapters and the run sends whole weights, or the other way
    round."""
    lora, others = config.model.lora, config.model.adapters
    if others and not engine.takes_adapters:
        named = ", ".join(f"{name}: {path}" for name, path in others.items())
        raise ConfigError(
            f"{engine.name} takes no adapters; restart it with `python scripts/serve_engine.py "
            f"'model.adapters={{{named}}}'`"
        )
    if others:
        return  # only evaluation and gateways have them, which send nothing; the server knows the names
    if not engine.takes_adapters:
        if lora.rank and lora.send == "adapter":
            raise ConfigError(
                f"{engine.name} takes no adapters; restart it with `python scripts/serve_engine.py "
                f"model.lora.rank={lora.rank}`, or set model.lora.send=merged"
            )
    elif not lora.rank or lora.send == "merged":
        raise ConfigError(
            f"{engine.name} was started for adapters, and this run sends whole weights; restart it without "
            "--enable-lora, or set model.lora.rank=16 model.lora.send=adapter"
        )
    elif lora.rank > engine.max_rank:
        raise ConfigError(
            f"{engine.name} holds adapters up to rank {engine.max_rank}, and this run has model.lora.rank={lora.rank}; "
            f"restart it with --max-lora-rank {buffer_rank(lora.rank)}"
        )


def check_quantization(engine: ServerEngine, config: Config, *, stored: str | None) -> None:
    """Raise `ConfigError` if a server quantizes weights and the run says otherwise, or the other way round.

    stored: method of the checkpoint's weights, for which vLLM may have a name of its own.
    """
    wanted = config.rollout.quantization
    if (stored is None and engine.quantization == wanted) or (stored is not None and engine.quantization is not None):
        return
    others = f", or set rollout.quantization={typed(engine.quantization)}" if stored is None else ""
    raise ConfigError(
        f"{engine.name} computes with quantization={typed(engine.quantization)}, and this run has "
        f"{f'quantized weights ({stored})' if stored else f'rollout.quantization={typed(wanted)}'}; restart it with "
        f"`python scripts/serve_engine.py`{others}"
    )


def engine_key(variable: str | None, *, setting: str = "rollout.api_key_env") -> str | None:
    """Return the key of the servers. setting: that names the environment variable.

    Raises `ConfigError` if the variable is not set, or has another value than a header can carry.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"the key of the vLLM servers is expected in the environment variable {variable}, which is not set; "
            f"`export {variable}=$(openssl rand -hex 32)` for servers and trainer alike, or set {setting}=null "
            "for servers without a key"
        )
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"the key in the environment variable {variable} has spaces at its ends, line breaks, or characters other "
            f"than ASCII, which HTTP headers cannot carry; set another one: `export {variable}=$(openssl rand -hex 32)`"
        )
    return key


def engine_settings(config: Config, **placed: Any) -> EngineSettings:
    """Return the settings of an engine of this configuration. placed: values that override it."""
    settings = config.rollout
    configured: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": settings.max_model_len,
        "context": config.engine_context,
        "quantization": settings.quantization,
        "adapters": adapter_settings(config),
        "return_routes": config.replays_engine,
        "batch_invariant": settings.batch_invariant,
        "seed": config.seed,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_gib": cache_gib(config),
        "compile_on_cpu": settings.compile_engine,
        # CUDA IPC hands weights to an engine on the trainer's own GPU; gloo is the transport between CPU processes.
        "weight_transfer_backend": "cuda_ipc" if torch.cuda.is_available() else "gloo",
        "request_timeout_s": settings.request_timeout_s,
        "start_timeout_s": settings.start_timeout_s,
    }
    return EngineSettings(**(configured | placed))
