"""Order of CUDA streams around an exchange, on a model of streams: vLLM iterates on two of them in turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from lockstep.rollout.weights import shards
from lockstep.rollout.weights.shards import StreamOrder


@dataclass(eq=False)
class Stream:
    """CUDA stream that knows which kernels are certain to have run before its next one."""

    before: set[str] = field(default_factory=set)

    def launch(self, kernel: str) -> None:
        self.before.add(kernel)

    def record_event(self) -> frozenset[str]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event


@dataclass(eq=False)
class OnGpu:
    is_cuda: bool = True
    streams: list[Stream] = field(default_factory=list)

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Return a list whose last element is the current stream."""
    streams = [Stream()]
    monkeypatch.setattr(shards.torch.cuda, "current_stream", lambda: streams[-1])
    return streams


def test_each_step_of_an_exchange_follows_the_one_before_on_another_stream(current: list[Stream]) -> None:
    order, value = StreamOrder(), OnGpu()
    begin, wait, use = current[0], Stream(), Stream()
    begin.launch("earlier reader of the memory")
    order.record([value])  # type: ignore[list-item]

    current.append(wait)
    order.follow([value])  # type: ignore[list-item]
    assert "earlier reader of the memory" in wait.before
    wait.launch("copy of own ranges")
    order.record([value])  # type: ignore[list-item]

    current.append(use)
    order.follow([value])  # type: ignore[list-item]
    assert use.before >= {"earlier reader of the memory", "copy of own ranges"}
    assert value.streams == [wait, use], "the allocator must not give the memory away before these have read it"


def test_streams_are_not_asked_for_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards.torch.cuda, "current_stream", lambda: pytest.fail("asked for a stream"))
    order = StreamOrder()
    order.record([torch.zeros(1)])
    order.follow([torch.zeros(1)])
