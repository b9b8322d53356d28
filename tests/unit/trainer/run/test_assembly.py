"""Parts of a run, made from the settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.trainer.config.schema import Config
from lockstep.trainer.run import assembly


@pytest.mark.parametrize(
    ("device", "configured", "share"), [("cpu", None, 1.0), ("cuda", None, 0.01), ("cuda", 1.0, 1.0), ("cpu", 0.2, 0.2)]
)
def test_canaries_take_a_hundredth_of_the_time_on_gpus(
    device: str, configured: float | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "WeightSync", SimpleNamespace)
    monkeypatch.setattr(assembly, "policy_of", lambda module: SimpleNamespace(model=None))
    config = Config()
    config.sync.canary_share = configured
    distributed: Any = SimpleNamespace(device=torch.device(device), unwrapped=None)
    sync: Any = assembly.make_sync(config, distributed, SimpleNamespace(logprobs=None), engines=[])  # type: ignore[arg-type]
    assert sync.canary_share == share
