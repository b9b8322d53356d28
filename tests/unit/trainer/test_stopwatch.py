"""Attribution of time to stages on devices that run kernels after the call that launched them."""

from __future__ import annotations

import time

import pytest
import torch

from lockstep.trainer.stopwatch import Stopwatch


def test_a_stage_lasts_until_the_device_has_run_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: time.sleep(0.2))
    watch = Stopwatch()
    with watch.stage("update"):
        pass
    assert watch.seconds("update") >= 0.2


def test_a_failed_stage_keeps_its_error_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: pytest.fail("waited for a device in error"))
    watch = Stopwatch()
    with pytest.raises(ValueError, match="in the stage"), watch.stage("update"):
        raise ValueError("in the stage")
    assert watch.metrics()["time/update"] >= 0


def test_the_begin_of_a_stage_is_told():
    begun: list[str] = []
    watch = Stopwatch(begun.append)
    with watch.stage("score"):
        assert begun == ["score"]
    with watch.stage("update"):
        assert begun == ["score", "update"]


def test_the_time_of_an_inner_stage_is_not_that_of_the_outer_one():
    watch = Stopwatch()
    with watch.stage("update"):
        time.sleep(0.02)
        with watch.stage("data"):
            time.sleep(0.1)
        time.sleep(0.02)
    assert watch.seconds("data") >= 0.1
    assert watch.seconds("update") >= 0.04
    metrics = watch.metrics()
    assert metrics["time/update"] + metrics["time/data"] <= metrics["time/step"]
