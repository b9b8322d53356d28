"""Standalone gateway that serves a model with the sampling settings of training."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

from lockstep.integrations.gateway.server import Gateway
from lockstep.trainer.build import make_chat, make_gateway_settings, make_sampling
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.start import open_engine


def run(config: Config) -> None:
    """Start the engine and the gateway, print the URL and the key, and wait for Ctrl-C or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    settings = make_gateway_settings(config.gateway, config.model)
    urls = ", ".join(config.rollout.urls)
    print(f"waiting for {urls} ..." if urls else f"starting the engine with {config.model.path} ...", flush=True)
    chat = make_chat(config.model, history=config.environment.history)
    with open_engine(config, chat.images) as engine:
        temperatures = dict.fromkeys([config.rollout.temperature, config.eval.temperature])
        sampling = make_sampling(config.rollout, chat, with_routes=config.plan.replays_engine)
        samplings = [replace(sampling, temperature=temperature) for temperature in temperatures]
        gateway = Gateway(engine=engine, chat=chat, offered=samplings, settings=settings)
        engine.loop.run(gateway.start())
        print(
            f"model     {settings.model_name}\n"
            f"base URL  {gateway.base_url}\n"
            f"API key   {gateway.api_key}\n"
            "Ctrl-C stops it",
            flush=True,
        )
        stop.wait()
        engine.loop.run(gateway.close())
