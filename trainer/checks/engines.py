"""Conflicts between settings of engines, and invalid addresses."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.rollout.system.addresses import is_loopback
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.outputs_settings import ServerConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig, SyncConfig
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES


def engine_problems(
    settings: RolloutConfig, sync: SyncConfig, server: ServerConfig, *, correction_mode: str
) -> Iterator[str]:
    if settings.engine == "server" and not settings.urls:
        yield "rollout.engine=server needs addresses of servers; set rollout.urls=[http://127.0.0.1:8000]"
    if settings.engine != "server" and settings.urls:
        yield (
            f"rollout.urls={settings.urls} is for rollout.engine=server, found rollout.engine={settings.engine}; "
            "set rollout.engine=server, or rollout.urls=[]"
        )
    if settings.engine == "colocated" and settings.sleep_level and settings.max_staleness:
        yield (
            f"rollout.max_staleness={settings.max_staleness} samples while the trainer computes, when rollout.engine="
            "colocated sleeps; set rollout.sleep_level=0, or rollout.max_staleness=0"
        )
    if settings.quantization is not None and not CORRECTION_MODES[correction_mode].corrects_tokens:
        yield (
            f"rollout.quantization={settings.quantization} samples from another distribution than the trainer's, "
            f"which correction.mode={correction_mode} does not correct per token; set correction=token_truncate"
        )
    if settings.urls:
        from lockstep.rollout.server.url_list import server_problems  # runs without servers do not load it

        yield from server_problems(settings.urls, drivers=settings.drivers, address=sync.address)
    elif sync.address is not None:
        yield f"sync.address={sync.address} is for rollout.engine=server; set sync.address=null"
    if settings.api_key_env is None and not is_loopback(server.host):
        yield (
            f"server.host={server.host} without a key lets every client that reaches it replace the weights of "
            "the server; set rollout.api_key_env=LOCKSTEP_ENGINE_KEY, or server.host=127.0.0.1"
        )


def image_problems(model: ModelConfig) -> Iterator[str]:
    """Yield one sentence per setting under which images cannot be seen."""
    if model.images.train_tower and model.lora.rank:
        yield (
            f"model.images.train_tower=true: with adapters (model.lora.rank={model.lora.rank}) the vision tower stays "
            "frozen; set model.images.train_tower=false, or model.lora.rank=0"
        )
