"""The parts of a run, made from the configuration. Training, evaluation and replays share them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rewards import FaultTolerance, Isolation, Outcome, RewardSet, Shaping, make_reward_set
from rollout.chat.chat import Chat
from rollout.engine.embedded import EmbeddedEngine
from rollout.engine.pool import EnginePool
from rollout.engine.protocol import Engine, Sampling, SyncedEngine
from rollout.environments import make_environment
from rollout.errors import ConfigError
from rollout.gateway import GatewaySettings
from rollout.sampler.sampler import Sampler
from rollout.server.server_engine import RemoteEngine
from rollout.system.background_loop import BackgroundLoop
from trainer.config.schema import Config
from trainer.model.policy import Policy


def start_engine(config: Config, *, loop: BackgroundLoop, log_path: Path) -> EnginePool:
    """The engines for a process by itself: vLLM in it, or connections to servers. A run has
    `trainer/engines/run_engines.py`.

    Raises `EngineError`: vLLM does not start (with the end of its log), or a server is not there.
    """
    return EnginePool(start_members(config, loop=loop, log_path=log_path))


def start_members(config: Config, *, loop: BackgroundLoop, log_path: Path) -> Sequence[SyncedEngine]:
    """The same, one by one."""
    if config.rollout.engine == "server":
        return connect_servers(config, loop=loop)
    number = config.rollout.num_engines
    if number == 1:
        return [embedded_engine(config, loop=loop, log_path=log_path)]
    check_cores(number)
    paths = [log_path, *(log_path.with_stem(f"{log_path.stem}-{index}") for index in range(1, number))]
    return [
        embedded_engine(config, loop=loop, log_path=path, name=f"embedded engine {index}", local_place=(index, number))
        for index, path in enumerate(paths)
    ]


def check_cores(num_engines: int) -> None:
    """Raises `ConfigError` if so many embedded engines would not have a core each, or would meet on a GPU."""
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


def connect_servers(config: Config, *, loop: BackgroundLoop) -> list[RemoteEngine]:
    settings = config.rollout
    model = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    engines = [
        RemoteEngine.connect(
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
        if engine.max_model_len < settings.max_model_len:
            raise ConfigError(
                f"{engine.name} has a context of {engine.max_model_len} tokens, expected {settings.max_model_len}; "
                f"restart it with --max-model-len {settings.max_model_len}, or set "
                f"rollout.max_model_len={engine.max_model_len}"
            )
        engine.max_model_len = settings.max_model_len
    return engines


def engine_key(variable: str | None) -> str | None:
    """The key of the servers. Raises `ConfigError` if it should be in the environment and is not."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"the key of the vLLM servers is expected in the environment variable {variable}, which is not set; "
            f"`export {variable}=$(openssl rand -hex 32)` for servers and trainer alike, or set rollout.api_key_env="
            "null for servers without a key"
        )
    return os.environ[variable]


def embedded_engine(config: Config, *, loop: BackgroundLoop, log_path: Path, **placed: Any) -> EmbeddedEngine:
    """placed: settings of `EmbeddedEngine.start` that are not the configuration's."""
    settings = config.rollout
    return EmbeddedEngine.start(
        config.model.path,
        loop=loop,
        log_path=log_path,
        dtype=config.model.dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        seed=config.seed,
        # CUDA IPC hands weights to an engine on the trainer's own GPU; gloo is the transport between CPU processes.
        weight_transfer_backend="ipc" if torch.cuda.is_available() else "gloo",
        request_timeout_s=settings.request_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        trust_remote_code=config.model.trust_remote_code,
        compile_on_cpu=settings.compile_engine,
        **{"kv_cache_gib": settings.kv_cache_gib, **placed},
    )


def load_policy(config: Config) -> Policy:
    """The policy that is trained."""
    return Policy.from_pretrained(
        config.model.path,
        dtype="float32",  # master weights; mixed precision is the framework's (trainer/distributed/distributed.py)
        attn_implementation=config.attention,
        gradient_checkpointing=config.model.gradient_checkpointing,
        is_compiled=config.model.compile,
        trust_remote_code=config.model.trust_remote_code,
        compute_dtype=config.model.dtype,
        lora=config.model.lora,
    )


def make_chat(config: Config) -> Chat:
    return Chat.from_pretrained(
        config.model.path,
        history=config.environment.history,
        trust_remote_code=config.model.trust_remote_code,
    )


def make_sampler(config: Config, *, engine: Engine, chat: Chat) -> Sampler:
    environment = config.environment
    return Sampler(
        engine=engine,
        chat=chat,
        make_environment=partial(make_environment, environment.name, **environment.settings),
        max_turns=environment.max_turns,
        seed=config.seed,
        gateway=make_gateway_settings(config),
    )


def make_gateway_settings(config: Config) -> GatewaySettings:
    settings = config.gateway
    return GatewaySettings(
        host=settings.host,
        port=settings.port,
        api_key=settings.api_key,
        model_name=settings.model_name or Path(config.model.path).name,
        max_request_mib=settings.max_request_mib,
    )


def make_sampling(config: Config, chat: Chat, *, temperature: float) -> Sampling:
    settings = config.rollout
    return Sampling(
        max_tokens=settings.max_tokens_per_turn,
        temperature=temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop_token_ids=() if settings.ignore_eos else tuple(chat.stop_token_ids),
        ignore_eos=settings.ignore_eos,
    )


def make_rewards(config: Config) -> RewardSet:
    settings, algorithm = config.reward, config.algorithm
    return make_reward_set(
        settings.functions,
        settings.weights,
        settings.settings,
        FaultTolerance(
            timeout_s=settings.timeout_s,
            on_error={Outcome(outcome): action for outcome, action in settings.on_error.items()},
            max_error_rate=settings.max_error_rate,
            window=settings.error_window,
        ),
        Isolation(
            mode=settings.isolation,  # type: ignore[arg-type]  # Hydra refuses Literal; its choices are checked
            workers=settings.workers,
            memory_gib=settings.memory_gib,
        ),
        Shaping(
            turn_rewards=algorithm.turn_rewards,
            horizon=config.horizon,
            overlong_buffer=algorithm.overlong_buffer,
            overlong_penalty=algorithm.overlong_penalty,
        ),
    )
