"""The engines of a run: those that this rank samples from, and those whose weights it replaces.

embedded, server    rank 0 samples and sends the weights
colocated           every rank has an engine and sends it the weights; rank 0 samples from all of them
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.addresses import LOOPBACK, address_towards
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.roster import Roster
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.start import engine_settings, start_embedded
from lockstep.trainer.model.memory_plan import GIB, USABLE, MemoryPlan, cache_gib_left, memory_plan
from lockstep.trainer.model.shape import planned_shape

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing
    from lockstep.rollout.server.remote_rank_engine import EngineService

log = logging.getLogger(__name__)

PEER_GRACE_S = 60.0
"""Extra wait for another rank's engine beyond that rank's own timeout, so that it can report the cause [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines of one rank."""

    loop: BackgroundLoop
    pool: EnginePool | None = None
    """Engines that episodes sample from; None on ranks without episodes."""
    synced: Roster = field(default_factory=lambda: Roster([]))
    """Engines whose weights this rank replaces."""
    colocated: Sequence[EmbeddedEngine] = ()
    """Those of `synced` that share a GPU with this rank's trainer."""
    service: EngineService | None = None
    """Service through which rank 0 reaches this rank's engine."""

    def restart_dead(self) -> list[str]:
        """Restart this rank's dead engines with the weights on disk, and return their names."""
        return [engine.name for engine in self.synced.engines if engine.restart_if_dead()]

    @property
    def has_engine(self) -> bool:
        """True if an engine of this rank serves, or a server waits to join."""
        return self.synced.has_engine

    def close(self) -> None:
        self.synced.close()
        if self.pool is not None:
            self.loop.run(self.pool.close())
        elif self.colocated:
            if self.service is not None:
                self.loop.run(self.service.close())
            self.loop.run(self.colocated[0].close())


def start_engines(
    config: Config,
    distributed: Distributed,
    *,
    loop: BackgroundLoop,
    logs: Path,
    images: ImageProcessing | None = None,
    warn: Callable[[str], None] = log.warning,
) -> Engines:
    """Start or connect to the engines of the configuration; a collective. logs: directory of the engines' logs.

    images: of prompts. warn: told of servers that leave and join.

    Raises `EngineError` on all ranks if vLLM does not start (with the end of its log) or a server cannot be reached.
    """
    rollout, context = config.rollout, config.engine_context

    def plan_memory() -> MemoryPlan:
        shape = planned_shape(
            config.model, config.algorithm, has_critic=config.plan.has_critic, engine_context=config.rotary_context
        )
        return memory_plan(shape, config, distributed.sharding)

    def settings() -> EngineSettings:
        """Return those of this rank's engine."""
        memory = _memory(plan_memory, available=distributed.device_memory)
        common = engine_settings(config.model, rollout, config.correction, seed=config.seed, context=context)
        return replace(common, **memory)

    if rollout.engine == "colocated":
        place = (int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        own = distributed.together(
            lambda: EmbeddedEngine(
                replace(settings(), local_place=place),
                loop=loop,
                log_path=logs / ("engine.log" if distributed.is_main else f"engine-{distributed.rank}.log"),
                name=f"the engine of rank {distributed.rank}",
                images=images,
            )
        )
        return _colocated(own, distributed, loop=loop, timeout_s=rollout.request_timeout_s + PEER_GRACE_S)

    def start() -> Engines:
        if not distributed.is_main:
            return Engines(loop=loop)
        if rollout.engine == "server":
            from lockstep.rollout.server.roster import ServerRoster  # other runs do not load its client
            from lockstep.trainer.engines.servers import Connector

            needs_routes = config.plan.replays_engine
            connector = Connector(
                config.model, rollout, context=context, needs_routes=needs_routes, loop=loop, images=images
            )
            pool = EnginePool(connector.connect_all())
            roster = ServerRoster(pool, addresses=connector.addresses, connect=connector.connect, warn=warn)
            return Engines(loop=loop, pool=pool, synced=roster)
        log_path = logs / "engine.log"
        members = start_embedded(settings(), rollout.num_engines, loop=loop, log_path=log_path, images=images)
        return Engines(loop=loop, pool=EnginePool(members), synced=Roster(members))

    return distributed.together(start)


def _colocated(own: EmbeddedEngine, distributed: Distributed, *, loop: BackgroundLoop, timeout_s: float) -> Engines:
    """Connect rank 0 to the engines of the other ranks. own: that of this rank."""
    from lockstep.rollout.server.remote_rank_engine import EngineService, RemoteRankEngine  # of colocated engines alone

    key: str = distributed.broadcast(secrets.token_hex(32))

    def serve() -> EngineService | None:
        if distributed.is_main:
            return None
        host = address_towards(os.environ.get("MASTER_ADDR", LOOPBACK))
        return loop.run(EngineService.start(own, host=host, key=key))

    service = distributed.together(serve)
    urls = distributed.gather_bytes(b"" if service is None else service.url.encode())

    def pool() -> EnginePool | None:
        if not distributed.is_main:
            return None
        peers = [
            RemoteRankEngine(url.decode(), key=key, rank=peer, loop=loop, timeout_s=timeout_s)
            for peer, url in enumerate(urls)
            if url
        ]
        return EnginePool([own, *peers])

    return Engines(loop=loop, pool=distributed.together(pool), synced=Roster([own]), colocated=[own], service=service)


def check_allocator(variables: Mapping[str, str]) -> None:
    """Raise `ConfigError` if torch allocates memory of a kind that CUDA IPC cannot share with an engine."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in variables.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"{name} has expandable_segments:True, whose memory cannot be shared with an engine on the trainer's "
                f"GPU by a handle; leave it out (`unset {name}`), or sample from servers with rollout=server"
            )


def _memory(plan_memory: Callable[[], MemoryPlan], *, available: int) -> dict[str, float]:
    """Return `kv_cache_gib` and `gpu_memory_utilization` of this rank's engine, configured or planned; nothing on a
    CPU."""
    if not torch.cuda.is_available():
        return {}
    check_allocator(os.environ)
    plan = plan_memory()
    cache_gib = plan.rollout.kv_cache_gib
    if cache_gib is None:
        cache_gib = cache_gib_left(plan, available=available)
    # vLLM starts only if this share is free; a restarted engine finds the trainer's memory in use.
    share = (plan.engine_weights + plan.engine_workspace + cache_gib * GIB) / available
    return {"kv_cache_gib": cache_gib, "gpu_memory_utilization": min(share, USABLE)}
