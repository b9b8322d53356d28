"""Reward functions that ask a server by a client that they keep, as judges do: one event loop serves all calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.rewards.composition import FaultTolerance, make_reward_set
from lockstep.rewards.workers.pool import Isolation
from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.rollout.system.background_loop import BackgroundLoop

JUDGES = """
import asyncio
import httpx

client = httpx.AsyncClient()
left = []

async def asks(rollout):
    left.append(asyncio.create_task(asyncio.sleep(600)))
    return float((await client.get(rollout.example["url"])).text)

def wrapped(rollout):
    return asks(rollout)

async def exits(rollout):
    raise SystemExit(3)

def wrapped_exits(rollout):
    return exits(rollout)
"""


class Keeping(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # which keeps connections open

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"0.5")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Keeping)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("mode", ["process", "thread"])
@pytest.mark.parametrize("names", [("asks", "exits"), ("wrapped", "wrapped_exits")])
def test_a_function_may_keep_its_client_between_calls(tmp_path: Path, url: str, mode, names):
    file = tmp_path / "judges.py"
    file.write_text(JUDGES)
    rewards = make_reward_set(
        [f"{file}:{name}" for name in names],
        tolerance=FaultTolerance(timeout_s=30.0, max_error_rate=1.0),
        isolation=Isolation(mode=mode, workers=1),
    )
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-0.5,), finish_reason=FinishReason.STOP)
    messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    rollout = Rollout(rollout_id=0, group_id=0, calls=(call,), messages=messages, example={"url": url})
    with BackgroundLoop() as loop:
        for _ in range(3):
            loop.run(rewards.score([rollout, rollout]))
    metrics = rewards.take_metrics()
    rewards.close()
    assert metrics["reward/errors/exception"] == 6, "of the function that exits"
    assert metrics[f"reward/{names[0]}/mean"] == 0.5
    assert sum(value for name, value in metrics.items() if name.startswith("reward/errors/")) == 6
