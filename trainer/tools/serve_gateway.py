"""Stand-alone gateway that serves a model with the sampling settings of training."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path

from rollout.gateway.server import Gateway
from rollout.system.background_loop import BackgroundLoop
from trainer.build import make_chat, make_gateway_settings, make_sampling
from trainer.config.schema import Config
from trainer.engines.start import start_engine


def run(config: Config) -> None:
    """Start the engine and the gateway, print the URL and the key, and wait for Ctrl-C or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    settings = make_gateway_settings(config)
    with tempfile.TemporaryDirectory(prefix="lockstep-serve-") as logs, BackgroundLoop() as loop:
        urls = ", ".join(config.rollout.urls)
        waiting = f"waiting for {urls} ..." if urls else f"starting the engine with {config.model.path} ..."
        print(waiting, flush=True)
        engine = start_engine(config, loop=loop, log_path=Path(logs) / "engine.log")
        try:
            chat = make_chat(config)
            temperatures = dict.fromkeys([config.rollout.temperature, config.eval.temperature])
            offered = [make_sampling(config, chat, temperature=temperature) for temperature in temperatures]
            gateway = Gateway(engine=engine, chat=chat, offered=offered, settings=settings)
            loop.run(gateway.start())
            print(
                f"model     {settings.model_name}\n"
                f"base URL  {gateway.base_url}\n"
                f"API key   {gateway.api_key}\n"
                "Ctrl-C stops it",
                flush=True,
            )
            stop.wait()
            loop.run(gateway.close())
        finally:
            loop.run(engine.close())
