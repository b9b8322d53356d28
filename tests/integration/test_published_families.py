"""Models as published, through scripts/train.py, against plain transformers: the table of docs/models.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.published import RESULTS
from scripts.published.models import published_models
from scripts.published.prove import prove
from tests.fixtures.forked_python import forked_python

RECORDED: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["proofs"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recorded", RECORDED, ids=[proof["family"] for proof in RECORDED])
def test_a_published_model_is_as_the_page_says(recorded: dict[str, Any], tmp_path: Path) -> None:
    proof = prove(published_models()[recorded["family"]], tmp_path, python=forked_python())
    assert proof.is_exact == (not recorded["refusal"]), proof
