"""Conflicts between settings of engines, and invalid addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.rollout.system.addresses import DNS, is_loopback, is_watched, url_problem
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.outputs_settings import ServerConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig, SyncConfig
from lockstep.trainer.objective.correction.modes import CORRECTION_MODES

EXAMPLE = "[http://127.0.0.1:8000]"


def engine_problems(
    settings: RolloutConfig, sync: SyncConfig, server: ServerConfig, *, correction_mode: str
) -> Iterator[str]:
    if settings.engine == "server" and not settings.urls:
        yield f"rollout.engine=server needs addresses of servers; set rollout.urls={EXAMPLE}"
    if settings.engine != "server" and settings.urls:
        yield (
            f"rollout.urls={settings.urls} is for rollout.engine=server, found rollout.engine={settings.engine}; "
            "set rollout.engine=server, or rollout.urls=[]"
        )
    watched = list(filter(is_watched, settings.urls))
    if watched and (settings.drivers or 1) > 1:
        yield (
            f"rollout.drivers={settings.drivers} have fixed shares of named servers, and {watched[0]} in rollout.urls "
            "stands for changing ones; set rollout.drivers=1, or name all servers"
        )
    elif settings.engine == "server" and settings.urls and (settings.drivers or 0) > len(settings.urls):
        number = len(settings.urls)
        yield (
            f"rollout.drivers={settings.drivers} have a server each at least, and rollout.urls has {number}; set "
            f"rollout.drivers={number} or less"
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
    yield from url_problems("rollout.urls", [entry for entry in settings.urls if not is_watched(entry)])
    yield from _list_problems(settings.urls)
    if sync.address is not None:
        yield from _address_problems(sync.address, settings.urls)
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


def url_problems(name: str, urls: Sequence[str]) -> Iterator[str]:
    """Yield one sentence per invalid or repeated address of a server. name: of the setting."""
    for url in urls:
        if (problem := url_problem(url)) is not None:
            yield f"{name}: {url} {problem}; expected http://<host>:<port>, as in {name}={EXAMPLE}"
    plain = [url.rstrip("/") for url in urls]
    twice = sorted({url for url in plain if plain.count(url) > 1})
    if twice:
        yield f"{name} names {', '.join(twice)} twice, expected every server once; set {name} without it"


def _list_problems(entries: Sequence[str]) -> Iterator[str]:
    """Yield one sentence per entry of rollout.urls that is neither an address, nor a file or a host name of them."""
    for entry in filter(is_watched, entries):
        if "://" in entry and (problem := url_problem(entry, schemes=[DNS])) is not None:
            yield f"rollout.urls: {entry} {problem}; expected dns://<host>:<port>"
        elif "://" not in entry and not Path(entry).is_file():
            yield (
                f"rollout.urls: {entry} is neither an address nor a file; expected http://<host>:<port>, "
                "dns://<host>:<port>, or a file with an address per line"
            )


def _address_problems(address: str, urls: list[str]) -> Iterator[str]:
    if not urls:
        yield f"sync.address={address} is for rollout.engine=server; set sync.address=null"
    elsewhere = [url for url in urls if url_problem(url) is None and not is_loopback(urlsplit(url).hostname or "")]
    if is_loopback(address) and elsewhere:
        yield (
            f"sync.address={address} is loopback, where {elsewhere[0]} cannot fetch weights; set sync.address=null for "
            "the address that reaches it"
        )
