"""Settings of servers: `gateway` and `server`."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.trainer.setting import setting


@dataclass
class GatewayConfig:
    host: str = setting("127.0.0.1", "address of the gateway; other machines can reach it unless it is loopback")
    port: int = setting(0, "port of the gateway; 0: any free port", low=0, high=65535)
    api_key: str | None = setting(None, "key of clients; null: a random one for each run")
    model_name: str | None = setting(None, "model name for clients; null: the last part of model.path")
    max_request_mib: float = setting(64.0, "maximum size of a request [MiB]", above=0)


@dataclass
class ServerConfig:
    host: str = setting("127.0.0.1", "address of a server; other machines can reach it unless it is loopback")
    port: int = setting(8000, "port of the server", low=1, high=65535)
    vllm_args: list[str] = setting([], "further arguments for vLLM's server, for example [--tensor-parallel-size,2]")
