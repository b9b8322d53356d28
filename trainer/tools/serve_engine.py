"""A vLLM server for `rollout.engine=server`: its command line, environment and key, and the process it becomes."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping

import torch

from rollout.engine.embedded import device_arguments
from rollout.engine.plugin import CHILD_ENV, SCHEDULER
from rollout.errors import ConfigError, SyncError
from rollout.server.guard import KEY_ENV
from rollout.system.addresses import address_towards, is_loopback
from trainer.config.schema import Config
from trainer.engines.start import engine_key
from trainer.model.memory_plan import cache_gib

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""What `vllm serve` runs for one server; the `vllm` script itself fails in the CPU build."""
ROUTES = "rollout.server.generate_route.CompactGenerate"
GUARD = "rollout.server.guard.RequireKey"
DELIBERATE_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
"""Loopback and every interface, in so many words."""
KEEP_ALIVE_S = 60
"""Idle connections stay open this long; vLLM's 5 s close them under clients that pause between two steps."""


def command(config: Config) -> list[str]:
    """Arguments of the server. What is not obvious is why `rollout/engine/embedded.py` sets the same."""
    settings = config.rollout
    on_gpu = torch.cuda.is_available()
    arguments = [sys.executable, "-m", MODULE, "--model", config.model.path]
    arguments += ["--host", config.server.host, "--port", str(config.server.port)]
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--weight-transfer-config", json.dumps({"backend": "nccl" if on_gpu else "gloo"})]
    arguments += ["--dtype", config.model.dtype, "--seed", str(config.seed)]
    arguments += ["--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)]
    for name, value in device_arguments(
        is_cpu=not on_gpu, dtype=config.model.dtype, max_model_len=settings.max_model_len
    ).items():
        flag = name.replace("_", "-")
        shown_value = json.dumps(value) if isinstance(value, dict) else str(value)
        arguments += [f"--no-{flag}"] if value is False else [f"--{flag}", shown_value]
    cache = cache_gib(config)
    arguments += [] if cache is None else ["--kv-cache-memory-bytes", str(int(cache * 2**30))]
    arguments += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    arguments += ["--scheduler-cls", SCHEDULER, "--middleware", ROUTES]
    if settings.api_key_env is not None:
        arguments += ["--middleware", GUARD]  # after the routes, so that it guards them, too
    if config.model.trust_remote_code:
        arguments += ["--trust-remote-code"]
    if not on_gpu:
        arguments += ["--distributed-executor-backend", "uni"]
        arguments += [] if settings.compile_engine else ["--enforce-eager"]
    return [*arguments, *config.server.vllm_args]


def environment(*, on_gpu: bool, compiles: bool = False) -> dict[str, str]:
    """Variables of the server beside its key. compiles: the model, on a CPU; on a GPU vLLM always does."""
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weight and version routes
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        CHILD_ENV: "1",  # its processes end with it
    }
    if not on_gpu:
        # One process and one import of vLLM less; no compilation of single functions at the first request.
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": str(int(not compiles))}
    return variables


def shown(config: Config) -> str:
    """The same as one line for a shell, with the key by its name."""
    variables = environment(on_gpu=torch.cuda.is_available(), compiles=config.rollout.compile_engine)
    if config.rollout.api_key_env is not None:
        variables |= {KEY_ENV: f"${config.rollout.api_key_env}"}
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(command(config))])


def check_host(host: str) -> None:
    """Raises `ConfigError` for a name or an address that is loopback by accident, as that of `hostname -i` may be."""
    if host in DELIBERATE_HOSTS:
        return
    try:
        address = address_towards(host)
    except SyncError as error:
        raise ConfigError(f"server.host={host} is no address of this machine: {error}") from error
    if is_loopback(address):
        raise ConfigError(
            f"server.host={host} is loopback on this machine, where no other one reaches it; give the address of its "
            "network (`ip -4 addr` lists them), or server.host=127.0.0.1 for a trainer on this machine"
        )


def run(config: Config) -> None:
    """Become the server. Raises `ConfigError` if its key is not in the environment, or nobody would reach it."""
    check_host(config.server.host)
    key = engine_key(config.rollout.api_key_env)
    print(shown(config), flush=True)
    variables: Mapping[str, str] = environment(on_gpu=torch.cuda.is_available(), compiles=config.rollout.compile_engine)
    secret = {} if key is None else {KEY_ENV: key}
    arguments = command(config)
    os.execve(arguments[0], arguments, {**os.environ, **variables, **secret})
