"""The page of a location: a heat map with every layer, and text of models that cannot become markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lockstep.lab.locate.comparison import Errors
from lockstep.lab.locate.engine_trace import EngineTrace
from lockstep.lab.locate.landmarks import LOGITS, Landmark, Part
from lockstep.lab.locate.location import Group, Location, Verdict
from lockstep.lab.locate.location_report import explanation, to_json
from lockstep.lab.pages.location_page import layer_bands, location_page, opacity, write_location_page

SETTINGS = {"model": "<script>alert(1)</script>", "engine_dtype": "bfloat16", "trainer_dtype": "float32"}
POSITIONS = 9


def errors(landmark: Landmark, *, trainer: float, positions: int = POSITIONS) -> Errors:
    return Errors(
        landmark=landmark, engine=1e-7, trainer=trainer, engine_floor=1e-7, trainer_floor=1e-7,
        engine_T=torch.full((positions,), 1e-7), trainer_T=torch.full((positions,), trainer),
    )  # fmt: skip


@pytest.fixture
def location() -> Location:
    found = tuple(
        errors(Landmark(f"model.layers.{layer}.mlp.down_proj", Part.OUTPUT), trainer=1e-3 if layer == 1 else 1e-7)
        for layer in range(3)
    )
    trace = EngineTrace(
        ids=tuple(range(POSITIONS + 1)), num_prompt=6, dtype=torch.bfloat16, temperature=1.0,
        sampled_logprobs=torch.zeros(4), logits=torch.zeros(4, 8), inputs={}, outputs={}, routes={}, output_sizes={},
    )  # fmt: skip
    group = Group(operator="mlp.down_proj", landmarks=3, share=0.97, removed=0.9, left=0.9, is_named=True)
    return Location(
        verdict=Verdict.NAMED, kl=1e-4, kl_injected=1e-13, errors=(*found, errors(LOGITS, trainer=1e-7, positions=4)),
        named=(found[1],), groups=(group,), unmapped=("model.embed_tokens",), trace=trace,
    )  # fmt: skip


def test_every_layer_has_a_row_and_every_position_a_cell(location: Location) -> None:
    bands = layer_bands(location)
    assert [band.name for band in bands] == ["layer 0", "layer 1", "layer 2", "norm and head"]
    assert [band.is_marked for band in bands] == [False, True, False, False]
    assert bands[3].ratio_T.count_nonzero().item() == 4, "the head has the sampled positions alone"
    page = location_page(location, SETTINGS)
    first = page[page.index("<svg") : page.index("</svg>")]
    assert len(re.findall("<rect", first)) == len(bands) * POSITIONS


def test_the_page_names_the_operator_and_contains_no_foreign_markup(location: Location, tmp_path: Path) -> None:
    write_location_page(tmp_path / "new" / "page.html", location, SETTINGS)
    page = (tmp_path / "new" / "page.html").read_text()
    assert "part at mlp.down_proj in layer 1: the trainer is 1e+04 times its rounding away" in page
    assert "97% of KL 1.0e-04" in page
    assert "<script" not in page
    assert not re.search(r"""(src|href)=["']?http""", page)


def test_the_json_has_what_the_documentation_says(location: Location) -> None:
    report = to_json(location, SETTINGS)
    assert report["named"][0]["operator"] == "mlp.down_proj"
    assert (report["named"][0]["layer"], report["named"][0]["side"]) == (1, "trainer")
    assert report["groups"][0]["share"] == 0.97
    assert len(report["landmarks"]) == 4
    assert report["explanation"] == explanation(location)


def test_colors_begin_above_the_floor() -> None:
    assert [opacity(ratio) for ratio in (0.0, 1.0, float("inf"))] == [0.0, 0.0, 1.0]
    assert 0 < opacity(2.0) < opacity(100.0) < opacity(1e6) == 1.0
