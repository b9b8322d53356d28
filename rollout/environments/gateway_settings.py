"""Settings of a gateway, in a module of their own: runs without agents do not load the server."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.rollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Address, key and limits of a gateway."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    api_key: str | None = None
    """None: a random key."""
    model_name: str = "policy"
    """Name in `/v1/models`, and the model that requests with the gateway's key must ask for."""
    adapters: tuple[str, ...] = ()
    """Further models that they may ask for: adapters of the engine (`Sampling.model`)."""
    max_request_mib: float = 64.0
    """A conversation that is sent back with its ids and logprobs takes about 30 bytes per sampled token."""
    max_images: int = 0
    """Most images of one prompt."""

    def __post_init__(self) -> None:
        if self.api_key is not None and len(self.api_key) < 8:
            raise ConfigError("gateway.api_key has fewer than 8 characters; set gateway.api_key=null for a random key")
