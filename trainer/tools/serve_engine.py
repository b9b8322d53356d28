"""Start of a vLLM server for `rollout.engine=server`: command line, environment and key."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

import torch

from lockstep.rollout.engine.arguments import engine_arguments, engine_variables
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.plugin import CHILD_ENV, SCHEDULER
from lockstep.rollout.errors import ConfigError, SyncError
from lockstep.rollout.server.guard import KEY_ENV
from lockstep.rollout.system.addresses import address_towards, is_loopback
from lockstep.trainer.config.groups.outputs_settings import ServerConfig
from lockstep.trainer.config.redaction import redact_words
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.named_models import refuse_unfit_models
from lockstep.trainer.engines.servers import engine_key
from lockstep.trainer.engines.start import engine_settings

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""Module that `vllm serve` runs for one server. The `vllm` script itself fails in the CPU build."""
ROUTES = "lockstep.rollout.server.generate_route.CompactGenerate"
GUARD = "lockstep.rollout.server.guard.RequireKey"
EXPLICIT_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
"""Hosts that name loopback or all interfaces explicitly."""
KEEP_ALIVE_S = 60
"""Time after which idle connections close [s]. vLLM's 5 s would close them while clients pause between two steps."""


def command(engine: EngineSettings, server: ServerConfig, *, has_key: bool) -> list[str]:
    """Return the command line. `rollout/engine/embedded.py` sets the same options and gives the reasons."""
    on_gpu = torch.cuda.is_available()
    arguments = [sys.executable, "-m", MODULE, "--model", str(engine.model)]
    arguments += ["--host", server.host, "--port", str(server.port)]
    arguments += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--weight-transfer-config", json.dumps({"backend": "nccl" if on_gpu else "gloo"})]
    arguments += ["--dtype", engine.dtype, "--seed", str(engine.seed)]
    arguments += ["--max-model-len", str(engine.vllm_context), "--max-num-seqs", str(engine.max_num_seqs)]
    for name, value in engine_arguments(engine, is_cpu=not on_gpu).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            arguments += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    cache = engine.kv_cache_gib
    arguments += [] if cache is None else ["--kv-cache-memory-bytes", str(int(cache * 2**30))]
    arguments += ["--enable-return-routed-experts"] if engine.return_routes else []
    if engine.adapters is not None:
        arguments += ["--lora-modules", *(f"{name}={path}" for name, path in engine.adapters.served())]
    arguments += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    arguments += ["--scheduler-cls", SCHEDULER, "--middleware", ROUTES]
    if has_key:
        arguments += ["--middleware", GUARD]  # after the routes, so that it guards them too
    if engine.trust_remote_code:
        arguments += ["--trust-remote-code"]
    if not on_gpu:
        arguments += ["--distributed-executor-backend", "uni"]
        arguments += [] if engine.compile_on_cpu else ["--enforce-eager"]
    return [*arguments, *server.vllm_args]


def environment(engine: EngineSettings) -> dict[str, str]:
    """Return the environment variables of the server, without its key."""
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weight and version routes
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        CHILD_ENV: "1",  # its processes end with it
    }
    is_cpu = not torch.cuda.is_available()
    variables |= engine_variables(engine, is_cpu=is_cpu)
    if is_cpu:
        # One process and one import of vLLM less; no compilation of single functions at the first request.
        is_eager = not engine.compile_on_cpu
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": str(int(is_eager))}
    return variables


def shell_line(words: Sequence[str], variables: Mapping[str, str], *, key_env: str | None) -> str:
    """Return environment and command as one line for a shell, without secrets: for the key the name of its variable."""
    key = {} if key_env is None else {KEY_ENV: f"${key_env}"}
    settings = [f"{name}={value}" for name, value in {**variables, **key}.items()]
    return " ".join([*settings, shlex.join(redact_words(words))])


def check_host(host: str) -> None:
    """Raise `ConfigError` for a host that is loopback by accident, as the output of `hostname -i` may be."""
    if host in EXPLICIT_HOSTS:
        return
    try:
        address = address_towards(host)
    except SyncError as error:
        raise ConfigError(f"server.host={host} is not an address of this machine: {error}") from error
    if is_loopback(address):
        raise ConfigError(
            f"server.host={host} is loopback on this machine, which other machines cannot reach; set the address of a "
            "network interface (`ip -4 addr` lists them), or 127.0.0.1 for a trainer on this machine"
        )


def run(config: Config) -> None:
    """Replace this process by the server. Raises `ConfigError` without its key, or for an unreachable host."""
    check_host(config.server.host)
    refuse_unfit_models(config, print, trains=False)
    rollout, key_env = config.rollout, config.rollout.api_key_env
    key = engine_key(key_env)
    engine = engine_settings(config.model, rollout, config.correction, seed=config.seed, context=config.engine_context)
    words, variables = command(engine, config.server, has_key=key is not None), environment(engine)
    print(shell_line(words, variables, key_env=key_env), flush=True)
    secret = {} if key is None else {KEY_ENV: key}
    os.execve(sys.executable, words, {**os.environ, **variables, **secret})
