"""Layers in bfloat16 on rows of 1,500 tokens, under each launcher: within the rounding of their dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.families import save_family
from tests.fixtures.ranks import accelerate, reports

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

FAMILIES = ("qwen3", "gemma3")


@pytest.mark.parametrize("launch_file", ["ddp", "zero2", "zero3"])
def test_layers_are_as_exact_as_bfloat16_on_two_ranks(launch_file: str, tmp_path: Path) -> None:
    for family in FAMILIES:
        save_family(family, tmp_path / "models" / family)
    ranks = reports(accelerate(launch_file), "tests.integration.workers.start_checks", tmp_path, timeout_s=280)
    for found in ranks:
        assert set(found) == set(FAMILIES)
        for family, layers in found.items():
            assert max(layers.values()) < 0.3, (family, layers)
