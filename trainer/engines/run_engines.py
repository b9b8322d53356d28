"""The engines of a run. A rank with engines is a driver: it samples from them, and replaces their weights.

embedded     rank 0, from its own engines
colocated    every rank, from its own engine
server       driver i of N (`rollout.drivers`), from the servers `rollout.urls[i::N]`
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.pool import EnginePool
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.control_plane import Roster
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.start import engine_settings, start_embedded
from lockstep.trainer.model.memory_plan import GIB, USABLE, MemoryPlan, cache_gib_left, memory_plan
from lockstep.trainer.model.shape import planned_shape

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines of one rank."""

    loop: BackgroundLoop
    pool: EnginePool | None = None
    """Engines that episodes of this rank sample from; None on ranks that do not drive."""
    synced: Roster = field(default_factory=lambda: Roster([]))
    """Engines whose weights this rank replaces: those of the pool."""
    is_colocated: bool = False
    """True if they share a GPU with this rank's trainer."""

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


def start_engines(
    config: Config,
    distributed: Distributed,
    *,
    loop: BackgroundLoop,
    logs: Path,
    drivers: Sequence[int] = (0,),
    images: ImageProcessing | None = None,
    warn: Callable[[str], None] = log.warning,
) -> Engines:
    """Start or connect to the engines of the configuration; a collective. logs: directory of the engines' logs.

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

    def start() -> Engines:
        if distributed.rank not in drivers:
            return Engines(loop=loop)
        members: Sequence[EmbeddedEngine]
        is_colocated = rollout.engine == "colocated"
        if is_colocated:
            place = (int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            own = EmbeddedEngine(
                replace(settings(), local_place=place),
                loop=loop,
                log_path=logs / ("engine.log" if distributed.is_main else f"engine-{distributed.rank}.log"),
                name=f"the engine of rank {distributed.rank}",
                images=images,
            )
            members = [own]
        elif rollout.engine == "server":
            from lockstep.rollout.server.server_roster import ServerRoster  # other runs do not load its client
            from lockstep.trainer.engines.servers import Connector

            connector = Connector(
                config.model,
                replace(rollout, urls=rollout.urls[drivers.index(distributed.rank) :: len(drivers)]),
                context=context,
                needs_routes=config.plan.replays_engine,
                loop=loop,
                images=images,
            )
            pool = EnginePool(connector.connect_all())
            roster = ServerRoster(pool, addresses=connector.addresses, connect=connector.connect, warn=warn)
            return Engines(loop=loop, pool=pool, synced=roster)
        else:
            log_path = logs / "engine.log"
            members = start_embedded(settings(), rollout.num_engines, loop=loop, log_path=log_path, images=images)
        return Engines(loop=loop, pool=EnginePool(members), synced=Roster(members), is_colocated=is_colocated)

    return distributed.together(start)


def check_allocator(variables: Mapping[str, str]) -> None:
    """Raise `ConfigError` if torch allocates memory of a kind that CUDA IPC cannot share with an engine."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in variables.get(name, "").replace(" ", "").lower():
            raise ConfigError(
                f"{name} has expandable_segments:True, whose memory cannot be shared with an engine on the trainer's "
                f"GPU by a handle; leave it out (`unset {name}`), or sample from servers with rollout=server"
            )


def _memory(plan_memory: Callable[[], MemoryPlan], *, available: int) -> dict[str, float]:
    """Return `kv_cache_gib` and `gpu_memory_utilization` of this rank's engine, configured or planned; {} on a CPU."""
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
