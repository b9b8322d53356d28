"""bfloat16 on rows of 1,500 tokens, by launcher and family: layers and log-probabilities within its rounding."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from tests.fixtures.families import FAMILIES, save_family
from tests.fixtures.ranks import accelerate, reports

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

FLOOR = 0.016
"""Nats. Median differences of the families are 0.005 to 0.012, in each quarter of the row."""


KINDS = ("qwen3", "gemma2", "qwen3_moe", "deepseek_v3", "falcon_h1")
"""A family with tied weights, with windows, with experts, with latent attention, and with recurrent layers."""


@pytest.mark.parametrize(
    ("launch_file", "families"),
    [
        pytest.param("", FAMILIES, id="one process"),
        pytest.param("zero3", KINDS, id="zero3, of each kind"),
        pytest.param("zero3", FAMILIES, id="zero3", marks=pytest.mark.slow),
        pytest.param("ddp", FAMILIES, id="ddp", marks=pytest.mark.slow),  # rounds as one process does
        pytest.param("zero2", FAMILIES, id="zero2", marks=pytest.mark.slow),  # rounds as ZeRO-3 does
    ],
)
def test_long_rows_are_as_exact_as_bfloat16(launch_file: str, families: Collection[str], tmp_path: Path) -> None:
    for family in families:
        save_family(family, tmp_path / "models" / family)
    launcher = accelerate(launch_file) if launch_file else ()
    ranks = reports(
        launcher, "tests.integration.workers.start_checks", tmp_path, ranks=2 if launch_file else 1, timeout_s=280
    )
    for report in ranks:
        assert set(report) == set(families)
        for family, measured in report.items():
            assert max(measured["layers"].values()) < 0.3, (family, measured)
            quarters = measured["logprobs"]
            assert max(quarters) < FLOOR, (family, quarters)
            assert quarters[-1] < 1.5 * quarters[0], (family, quarters)  # no growth with the position
