"""The loop of user functions: one for all threads, also if they ask for it at once."""

from __future__ import annotations

import threading

import pytest

from lockstep.rollout.system import background_loop


def test_threads_that_ask_at_once_get_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    all_ask, loops = threading.Barrier(4), []
    made = background_loop.BackgroundLoop

    def slowly() -> background_loop.BackgroundLoop:
        loops.append(made())
        waits.wait(0.2)  # so that other threads ask meanwhile
        return loops[-1]

    def ask() -> None:
        all_ask.wait()
        background_loop.shared_loop()

    waits = threading.Event()
    background_loop._shared_loop.cache_clear()
    monkeypatch.setattr(background_loop, "BackgroundLoop", slowly)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    background_loop._shared_loop.cache_clear()
    for loop in loops:
        loop.close()
    assert len(loops) == 1
