"""Models as published, through scripts/train.py, against plain transformers: the table of docs/models.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.project.list_models import results
from scripts.published.models import published_models
from scripts.published.prove import MODES, prove
from tests.fixtures.forked_python import forked_python

QUICK = (("SmolLM3", "float32"),)
"""Proofs of `make test-long`."""


def recorded() -> list[Any]:
    return [
        pytest.param(
            proof,
            id=f"{proof['family']}-{proof['mode']}",
            marks=[] if (proof["family"], proof["mode"]) in QUICK else [pytest.mark.slow],
        )
        for proof in results()
    ]


@pytest.mark.engine
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("proof", recorded())
def test_a_published_model_is_as_the_page_says(proof: dict[str, Any], tmp_path: Path) -> None:
    mode = proof["mode"]
    python = sys.executable if MODES[mode].has_v2 else forked_python()  # forks have imported V1
    found = prove(published_models()[proof["family"]], tmp_path, mode=mode, python=python)
    assert found.is_exact == (not proof["refusal"]), found
