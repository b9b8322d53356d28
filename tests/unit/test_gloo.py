"""The sender's side of a gloo transfer, over real gloo, with a receiver that is slower than it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroupGloo

from rollout.addresses import LOOPBACK
from rollout.buckets import views
from rollout.gloo import (
    SENT,
    GlooInitInfo,
    GlooTrainerInitInfo,
    GlooTrainerWeightTransferEngine,
    GlooUpdateInfo,
    broadcast,
    join_group,
    message_bytes,
)
from rollout.source import ZeroSource


class SlowReceiver:
    """A worker of an engine: what arrives stays as bytes, and each bucket is waited for."""

    group: ProcessGroupGloo
    received: dict[str, torch.Tensor]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        info = GlooInitInfo(**init_info)
        self.group = join_group(
            info.master_address, info.master_port, info.rank_offset, info.world_size, info.timeout_s
        )

    def start_weight_update(self) -> None:
        self.received = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for metas in GlooUpdateInfo(**update_info).buckets():
            time.sleep(0.05)
            bucket = torch.zeros(message_bytes(metas), dtype=torch.uint8)
            broadcast(self.group, bucket).wait()
            assert bucket[-1] == SENT
            self.received |= views(bucket, metas)

    def finish_weight_update(self) -> None:
        """Nothing is loaded."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_stays_as_it_is_until_the_slowest_engine_has_it(dtype: torch.dtype) -> None:
    layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(6))  # more than a socket's buffer each
    model, receiver = nn.ModuleDict({"layers": layers}), SlowReceiver()
    source = ZeroSource(model, dtype=dtype)
    assert len(source.buckets()) == len(layers)
    sender = GlooTrainerWeightTransferEngine.trainer_init(
        GlooTrainerInitInfo(rank=0, master_address=LOOPBACK, world_size=2, timeout_s=30.0),
        client=receiver,  # type: ignore[arg-type]
        source=source,
    )
    for _ in range(2):
        sender.send_weights()
        assert receiver.received.keys() == dict(model.named_parameters()).keys()
        for name, param in model.named_parameters():
            assert torch.equal(receiver.received[name], param.detach().to(dtype)), name
            nn.init.normal_(param)
