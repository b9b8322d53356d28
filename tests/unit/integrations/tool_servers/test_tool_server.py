"""Servers of tools: one for all threads with the same settings, also if they ask for it at once."""

from __future__ import annotations

import contextlib
import threading

import pytest

from lockstep.integrations.tool_servers import tool_server
from lockstep.integrations.tool_servers.server_settings import ServerSettings


def test_threads_that_ask_at_once_get_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    all_ask, two_make, found = threading.Barrier(4), threading.Barrier(2), []
    made = tool_server.ToolServer

    def slowly(*arguments: object) -> tool_server.ToolServer:
        with contextlib.suppress(threading.BrokenBarrierError):
            two_make.wait(0.2)  # until another thread makes one, too
        return made(*arguments)  # type: ignore[arg-type]

    def ask() -> None:
        all_ask.wait()
        limits = tool_server.Limits(start_timeout_s=1.0, max_message_bytes=1)
        found.append(tool_server.tool_server(ServerSettings(name="one", command="nothing"), limits))

    monkeypatch.setattr(tool_server, "_servers", {})
    monkeypatch.setattr(tool_server, "ToolServer", slowly)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
