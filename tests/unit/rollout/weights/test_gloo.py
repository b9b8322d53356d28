"""Sender of a gloo transfer, over real gloo, with a slower receiver."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroupGloo

from lockstep.rollout.system.addresses import LOOPBACK
from lockstep.rollout.weights.gloo.trainer import GlooSender
from lockstep.rollout.weights.gloo.wire import GlooInitInfo, GlooUpdateInfo, Receivers, join_all, listen
from lockstep.rollout.weights.gloo.worker import receive
from lockstep.rollout.weights.source import SentElements, ZeroSource

TIMEOUT_S = 30.0


class SlowReceiver:
    """An engine worker that waits after each bucket and keeps the tensors."""

    groups: dict[int, ProcessGroupGloo]
    received: dict[str, torch.Tensor]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        info = GlooInitInfo(**init_info)
        self.groups = join_all(info, info.rank_offset)

    def start_weight_update(self) -> None:
        self.received = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for named in receive(self.groups, GlooUpdateInfo(**update_info).buckets()):
            time.sleep(0.05)
            self.received |= named

    def finish_weight_update(self) -> None:
        """Load nothing."""


def connected(source: ZeroSource, receiver: SlowReceiver) -> GlooSender:
    sender = GlooSender(source, sender=0, timeout_s=TIMEOUT_S)
    join(sender, source, {"the engine": receiver})
    return sender


def join(sender: GlooSender, source: ZeroSource, engines: dict[str, SlowReceiver]) -> None:
    stores = {name: listen(LOOPBACK, TIMEOUT_S) for name in engines}
    receivers = [
        Receivers(engine=name, rank=0, address=LOOPBACK, port=store.port, num_workers=1, senders=source.senders)
        for name, store in stores.items()
    ]
    sender.join(receivers, stores=stores, clients=engines)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sent_memory_stays_valid_until_a_slow_engine_has_received_it(dtype: torch.dtype) -> None:
    layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(6))  # each exceeds a socket's buffer
    model, receiver = nn.ModuleDict({"layers": layers}), SlowReceiver()
    source = ZeroSource(model, dtype=dtype)
    assert len(source.buckets()) == len(layers)
    sender = connected(source, receiver)
    for _ in range(2):
        sender.send_weights()
        assert receiver.received.keys() == dict(model.named_parameters()).keys()
        for name, param in model.named_parameters():
            assert torch.equal(receiver.received[name], param.detach().to(dtype)), name
            nn.init.normal_(param)


def test_elements_without_a_sender_are_refused_before_anything_is_received() -> None:
    update = GlooUpdateInfo.of(ZeroSource(nn.Linear(4, 3)))
    assert update.names == ["weight", "bias"]
    update.parts[0] = [[0, 0, 5], [1, 6, 6]]
    with pytest.raises(RuntimeError, match="elements of weight from 5 on have no sender"):
        list(update.buckets())


def test_the_error_of_a_receiver_is_raised_by_the_sender() -> None:
    class Failing(SlowReceiver):
        def update_weights(self, update_info: dict[str, Any]) -> None:
            next(receive(self.groups, GlooUpdateInfo(**update_info).buckets()))
            raise MemoryError("no room for a bucket")

    sender = connected(ZeroSource(nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))), Failing())
    started = time.monotonic()
    with pytest.raises(MemoryError, match="no room"):
        sender.send_weights()
    assert time.monotonic() - started < TIMEOUT_S / 2


@pytest.mark.parametrize("lost", [4, 2**18], ids=["of a packed part", "of a large part"])
def test_a_rank_that_sends_fewer_bytes_than_announced_is_refused(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    source, receiver = ZeroSource(nn.ModuleList([nn.Linear(1024, 1024), nn.Linear(8, 8)])), SlowReceiver()
    sender, original = connected(source, receiver), ZeroSource.own_parts

    def less(self: ZeroSource) -> Iterator[list[SentElements]]:
        for sent in original(self):
            yield [
                dataclasses.replace(one, elements=one.elements[: -lost // 4]) if one.elements.nbytes > lost else one
                for one in sent
            ]

    monkeypatch.setattr(ZeroSource, "own_parts", less)
    with pytest.raises(RuntimeError, match=r"a rank sends \d+ bytes of a bucket, not \d+"):
        sender.send_weights()


class Stuck(SlowReceiver):
    """A worker that receives one bucket and then hangs, until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        buckets = receive(self.groups, GlooUpdateInfo(**update_info).buckets())
        next(buckets)
        self.released.wait()
        for _ in buckets:
            pass


def test_an_engine_that_hangs_in_a_transfer_is_lost_and_the_others_receive_all() -> None:
    layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(6))  # each exceeds a socket's buffer
    source, lost = ZeroSource(nn.ModuleDict({"layers": layers})), {}
    engines: dict[str, SlowReceiver] = {"a": SlowReceiver(), "b": Stuck(), "c": SlowReceiver()}
    sender = GlooSender(source, sender=0, timeout_s=TIMEOUT_S, silence_s=1.0, lose=lost.__setitem__)
    join(sender, source, engines)
    began = time.monotonic()
    sender.send_weights()
    assert time.monotonic() - began < TIMEOUT_S / 2, "silence, not the deadline of a collective"
    assert "took no part in the transfer for 1 s" in str(lost.pop("b"))
    assert not lost
    assert sender.names == ["a", "c"]
    engines["b"].released.set()  # type: ignore[attr-defined]
    newcomer = {"d": SlowReceiver()}
    join(sender, source, newcomer)
    for layer in layers:
        nn.init.normal_(layer.weight)
    sender.send_weights()
    for engine in (engines["a"], engines["c"], newcomer["d"]):
        for name, param in source_parameters(layers):
            assert torch.equal(engine.received[name], param), name


def source_parameters(layers: nn.ModuleList) -> list[tuple[str, torch.Tensor]]:
    return [(f"layers.{index}.weight", layer.weight.detach()) for index, layer in enumerate(layers)]


def test_an_engine_that_refuses_to_join_is_lost_alone() -> None:
    class Refusing(SlowReceiver):
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise ConnectionError("the server is gone")

    source, lost = ZeroSource(nn.Linear(4, 3)), {}
    sender = GlooSender(source, sender=0, timeout_s=TIMEOUT_S, silence_s=5.0, lose=lost.__setitem__)
    began = time.monotonic()
    join(sender, source, {"a": SlowReceiver(), "b": Refusing()})
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert sender.names == ["a"]
    assert str(lost["b"]) == "the server is gone"
    sender.send_weights()
