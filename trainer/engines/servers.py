"""Connections to vLLM servers: each must have the model, context and adapters of the configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import AutoConfig

from lockstep.rollout.engine.protocol import buffer_rank
from lockstep.rollout.errors import ConfigError, EngineError, LockstepError
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.server.url_list import is_watched, listed_urls
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.model.layers.rotary import LONGROPE, original_lengths
from lockstep.trainer.model.quantized_base import stored_method
from lockstep.trainer.setting import typed

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing


SHORT_S = 2.0
"""Time in which a server that joins a run must answer [s]."""


class Connector:
    """Connects to servers of a run, and checks that they fit it.

    Args:
        context: `Config.engine_context`.
        needs_routes: for their replay.
        images: of prompts.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        *,
        context: int,
        needs_routes: bool,
        loop: BackgroundLoop,
        images: ImageProcessing | None = None,
    ) -> None:
        self._model = model
        self._rollout = rollout
        self._context = context
        self._needs_routes = needs_routes
        self._loop = loop
        self._images = images
        self._model_config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)

    def addresses(self) -> list[str]:
        """Return the addresses that `rollout.urls` stands for now."""
        return listed_urls(self._rollout.urls)

    def connect_all(self) -> list[ServerEngine]:
        """Connect to all named servers, or to those that are ready of a file or a host name.

        Raises `EngineError` if a named server, or all of the others, cannot be reached within
        `rollout.start_timeout_s`, `ConfigError` for one that does not fit.
        """
        rollout = self._rollout
        fixed = listed_urls([entry for entry in rollout.urls if not is_watched(entry)])
        engines = [self.connect(url, within_s=rollout.start_timeout_s) for url in fixed]
        if len(fixed) < len(rollout.urls):
            engines += self._connect_listed(fixed, is_needed=not fixed)
        for number, engine in enumerate(engines):
            for other in engines[:number]:
                if engine.instance == other.instance:
                    raise ConfigError(f"{engine.name} and {other.name} are one process; name it once in rollout.urls")
        return engines

    def _connect_listed(self, fixed: Sequence[str], *, is_needed: bool) -> list[ServerEngine]:
        """Connect to the servers of files and host names that are ready. fixed: those named by address.

        is_needed: waits for one at least.
        """
        give_up_at = time.monotonic() + self._rollout.start_timeout_s
        while True:
            ready: list[ServerEngine] = []
            failure: LockstepError = EngineError("no address is listed")
            try:
                urls = [url for url in self.addresses() if url not in fixed]
            except EngineError as error:  # a name that does not resolve yet
                urls, failure = [], error
            for url in urls:
                try:
                    ready.append(self.connect(url))
                except LockstepError as error:
                    failure = error
            if ready or not is_needed:
                return ready
            if time.monotonic() >= give_up_at:
                raise EngineError(
                    f"no server of rollout.urls={self._rollout.urls} was ready within "
                    f"{self._rollout.start_timeout_s:g} s: {failure}"
                )
            time.sleep(SHORT_S)

    def connect(self, url: str, *, within_s: float = SHORT_S) -> ServerEngine:
        """Connect to one server. Raises `EngineError` if it is not ready in time, `ConfigError` if it does not fit."""
        rollout = self._rollout
        engine = ServerEngine(
            url,
            loop=self._loop,
            vocab_size=self._model_config.get_text_config().vocab_size,
            api_key=engine_key(rollout.api_key_env),
            request_timeout_s=rollout.request_timeout_s,
            start_timeout_s=within_s,
            silence_timeout_s=rollout.silence_timeout_s,
            images=self._images,
        )
        try:
            self._check(engine)
        except ConfigError:
            self._loop.run(engine.close())
            raise
        engine.max_model_len = rollout.max_model_len
        return engine

    def _check(self, engine: ServerEngine) -> None:
        model, rollout, context = self._model, self._rollout, self._context
        dtype = str(engine.dtype).removeprefix("torch.")
        if dtype != model.dtype:
            raise ConfigError(
                f"{engine.name} computes in {dtype}, the trainer in {model.dtype}; restart it with "
                f"--dtype {model.dtype}, or set model.dtype={dtype}"
            )
        if engine.context < context:
            fitting = rollout.max_model_len - context + engine.context
            raise ConfigError(
                f"{engine.name} has a context of {engine.context} tokens, expected {context}; "
                f"restart it with --max-model-len {context}, or set rollout.max_model_len={fitting}"
            )
        original = original_lengths(self._model_config).get(LONGROPE)
        if original is not None and context <= original < engine.context:
            raise ConfigError(
                f"{engine.name} has a context of {engine.context} tokens, so it uses the long factors of the model's "
                f"longrope positions, and the run with rollout.max_model_len={rollout.max_model_len} the short ones; "
                f"restart it with --max-model-len {context}"
            )
        if self._needs_routes and not engine.returns_routes:
            raise ConfigError(
                f"{engine.name} returns no routed experts; restart it with --enable-return-routed-experts, or set "
                "correction.routing_replay=off"
            )
        check_images(engine, model.images.max_per_prompt)
        check_adapters(engine, model)
        check_quantization(engine, rollout.quantization, stored=stored_method(self._model_config))


def check_images(engine: ServerEngine, limit: int) -> None:
    """Raise `ConfigError` if a server takes fewer images of a prompt than the run has. limit: of the run."""
    if engine.max_images < limit:
        raise ConfigError(
            f"{engine.name} takes {engine.max_images} images of a prompt, and this run has model.images."
            f"max_per_prompt={limit}; restart it with `lockstep serve-engine model.images.max_per_prompt={limit}`, or "
            f"""with --limit-mm-per-prompt '{{"image": {limit}}}'"""
        )


def check_adapters(engine: ServerEngine, settings: ModelConfig) -> None:
    """Raise `ConfigError` if a server was started for adapters and the run sends whole weights, or the other way
    round."""
    lora, others = settings.lora, settings.adapters
    if others and not engine.takes_adapters:
        summary = ", ".join(f"{name}: {path}" for name, path in others.items())
        raise ConfigError(
            f"{engine.name} takes no adapters; restart it with `lockstep serve-engine 'model.adapters={{{summary}}}'`"
        )
    if others:
        return  # only evaluation and gateways have them, which send nothing; the server knows the names
    if not engine.takes_adapters:
        if lora.rank and lora.send == "adapter":
            raise ConfigError(
                f"{engine.name} takes no adapters; restart it with `lockstep serve-engine "
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


def check_quantization(engine: ServerEngine, method: str | None, *, stored: str | None) -> None:
    """Raise `ConfigError` if a server quantizes weights and the run says otherwise, or the other way round.

    method: `rollout.quantization`. stored: method of the checkpoint's weights, for which vLLM may have a name of its
    own.
    """
    if (stored is None and engine.quantization == method) or (stored is not None and engine.quantization is not None):
        return
    others = f", or set rollout.quantization={typed(engine.quantization)}" if stored is None else ""
    raise ConfigError(
        f"{engine.name} computes with quantization={typed(engine.quantization)}, and this run has "
        f"{f'quantized weights ({stored})' if stored else f'rollout.quantization={typed(method)}'}; restart it with "
        f"`lockstep serve-engine`{others}"
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
