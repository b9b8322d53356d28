"""Location with a real engine: faults of one operator are named with operator, layer and side, and nothing else is.

The engine is traced in this process, once per family; the faults are planted into the trainer's model on the same row.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.lab.locate.engine_trace import EngineTrace, trace_engine
from lockstep.lab.locate.landmarks import PACKED, Part
from lockstep.lab.locate.location import Location, Verdict, locate
from lockstep.lab.locate.setup import prepared_reference
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES, save_family
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT
from tests.fixtures.planted_faults import FAULTS

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

PLANTED = {
    "qwen3": (
        "rotary base", "rotary scaling", "rotary frequencies in bfloat16", "norm epsilon", "bfloat16 product",
        "weight not sent", "norm not sent", "quantized layer", "transposed adapter", "untied head",
    ),
    "gemma2": ("missing final softcap", "missing attention softcap", "wrong window"),
    "qwen3_moe": ("swapped experts", "gate in bfloat16"),
    "qwen2": ("stale bias",),
}  # fmt: skip
OF_ONE_OPERATOR = ("norm epsilon", "bfloat16 product", "weight not sent", "quantized layer", "swapped experts")
PROMPT = tuple(3 + (7 * i) % 500 for i in range(24))

Traces = Callable[[str, str], tuple[Path, EngineTrace]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    @functools.cache
    def of(family: str, dtype: str) -> tuple[Path, EngineTrace]:
        directory = tmp_path_factory.mktemp(family)
        path = save_family(family, directory / "model")
        settings = EngineSettings(model=path, dtype=dtype, max_model_len=320, kv_cache_gib=0.0625)
        return path, trace_engine(settings, PROMPT, sampled=24, temperature=1.0, log_path=directory / "engine.log")

    return of


def located(traced: Traces, family: str, dtype: str = "float32", fault: str | None = None) -> Location:
    path, trace = traced(family, dtype)
    trainer, reference = Policy.from_pretrained(path), Policy.from_pretrained(path)
    if fault is not None:
        with torch.no_grad():
            FAULTS[fault].plant(trainer.causal_lm)
            if FAULTS[fault].side == "engine":
                FAULTS[fault].plant(reference.causal_lm)
    return locate(trainer.causal_lm, prepared_reference(reference), trace)


def assert_named(location: Location, fault: str) -> None:
    assert location.verdict is Verdict.NAMED
    first, expected = location.named[0], FAULTS[fault]
    assert (first.landmark.operator, first.landmark.layer, first.side) == (
        expected.operator,
        expected.layer,
        expected.side,
    )


@pytest.mark.parametrize(("family", "fault"), [(family, one) for family, own in PLANTED.items() for one in own])
def test_a_planted_fault_is_named_with_its_operator_and_layer(traced: Traces, family: str, fault: str) -> None:
    location = located(traced, family, fault=fault)
    assert_named(location, fault)
    assert location.kl_injected < 1e-10, "the errors at the landmarks do not explain the divergence"
    if fault in OF_ONE_OPERATOR:
        assert len({(one.landmark.operator, one.landmark.layer) for one in location.named}) == 1
    shares = {group.operator: group.share for group in location.groups}
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.02)
    assert shares[FAULTS[fault].operator] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("family", PLANTED)
def test_nothing_is_named_without_a_fault(traced: Traces, family: str) -> None:
    location = located(traced, family)
    assert (location.verdict, location.named) == (Verdict.OK, ())
    assert location.kl < 1e-11
    streams = {one.landmark.layer for one in location.errors if one.landmark.part is Part.STREAM}
    assert streams >= {0, 1}, "residual streams are landmarks"


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - PLANTED.keys()))
def test_nothing_is_named_in_any_family(traced: Traces, family: str) -> None:
    location = located(traced, family)
    assert (location.verdict, location.named) == (Verdict.OK, ())
    assert not [one for one in location.errors if one.ratio > 100], "a wrong map"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "qwen2"])
def test_a_bfloat16_engine_is_compared_with_a_float32_trainer(traced: Traces, family: str) -> None:
    assert located(traced, family, "bfloat16").named == ()
    for fault in PLANTED[family]:
        if fault == "bfloat16 product":  # which is then what the engine computes
            continue
        assert_named(located(traced, family, "bfloat16", fault), fault)


def test_a_wrong_map_gives_no_name(traced: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    confused = PACKED | {"gate_proj": PACKED["up_proj"], "up_proj": PACKED["gate_proj"]}
    monkeypatch.setattr("lockstep.lab.locate.landmarks.PACKED", confused)
    for fault in (None, "weight not sent"):
        location = located(traced, "qwen3", fault=fault)
        assert (location.verdict, location.named) == (Verdict.UNPROVEN, ())


def run_locate(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forked_python(), ROOT / "scripts" / "diagnose.py", "--locate", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_command_prints_json_of_a_fixed_shape_and_writes_a_page(traced: Traces, tmp_path: Path) -> None:
    path, _ = traced("qwen3", "float32")
    page = tmp_path / "heat.html"
    done = run_locate([f"model.path={path}", "--json", "--html", str(page)], tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["format"], report["verdict"], report["named"]) == (1, "ok", [])
    assert report["row"]["prompt"] == report["row"]["sampled"] == 64
    assert {one["layer"] for one in report["landmarks"]} == {0, 1, None}
    assert page.read_text().startswith("<!DOCTYPE html>")
