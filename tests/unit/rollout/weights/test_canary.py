"""Rows of a canary and the differences that are accepted, with an engine whose scores the test chooses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.rollout.records import ImageSpan, PromptIds
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.canary import Canary, CanaryResult, CanarySettings, ImageRow, LongRow
from lockstep.rollout.weights.control_plane import ControlPlane

TOKENS, WINDOW = 400, 128


def stretches(tokens: int, *distances: int) -> list[int]:
    return LongRow(tokens=tokens, score_disturbed=lambda ids: [], distances=distances).stretches


def test_stretches_begin_at_quarters_and_distances() -> None:
    assert stretches(400) == [99, 100, 100, 100]
    assert stretches(400, 128) == [99, 28, 72, 100, 100]
    assert stretches(400, 101, 399) == [99, 100, 100, 100], "no stretch is shorter than 16 tokens"
    assert stretches(30) == [29]
    assert stretches(2) == [1]


class Scored:
    """A trainer whose log π are all -2, and an engine that differs from it by `differences` of the long row."""

    def __init__(
        self, loop: BackgroundLoop, *, rounding: float = 0.0, threshold: float | None = None, **engine: Any
    ) -> None:
        self.differences = torch.zeros(TOKENS - 1, dtype=torch.float64)
        self.short = 0.0

        async def score(ids: list[int]) -> list[float]:
            return (-2.0 + (self.differences if len(ids) == TOKENS else self.short * torch.ones(len(ids) - 1))).tolist()

        stand_in: Any = SimpleNamespace(name="engine 0", loop=loop, score=score)
        self.engines = ControlPlane([stand_in], 30.0, is_staged=True)
        long = LongRow(
            tokens=TOKENS,
            distances=(WINDOW,),
            score_disturbed=lambda ids: [-2.0 + rounding] * (len(ids) - 1),
        )
        settings = CanarySettings(threshold=threshold, long=long)
        engine = {"dtype": torch.float32, "vocab_size": 100} | engine
        self.canary = Canary(lambda ids: [-2.0] * (len(ids) - 1), settings=settings, **engine)

    def result(self) -> CanaryResult:
        return self.canary.compare(self.engines, self.canary.expected(is_long=True))["engine 0"]


@pytest.fixture
def loop() -> Any:
    with BackgroundLoop() as background:
        yield background


def test_a_difference_beyond_a_window_is_named(loop: BackgroundLoop) -> None:
    scored = Scored(loop)
    assert not scored.result().is_wrong
    scored.differences[WINDOW:] = 2e-4
    result = scored.result()
    assert result.is_wrong
    assert str(result) == (
        "by 0.0002 in the median of tokens 128 to 199 of a row, beyond 128, where the model begins to compute in "
        "another way, expected at most 0.0001"
    )


def test_single_tokens_say_nothing(loop: BackgroundLoop) -> None:
    scored = Scored(loop)
    scored.differences[::3] = 1.0  # a third of the tokens have another expert
    assert not scored.result().is_wrong


def test_what_rounding_explains_is_accepted(loop: BackgroundLoop) -> None:
    scored = Scored(loop, rounding=1.0, dtype=torch.bfloat16)
    for difference, is_wrong in ((9.0, False), (11.0, True), (math.nan, True)):
        scored.differences[:] = difference
        assert scored.result().is_wrong is is_wrong


def test_a_chosen_threshold_holds_for_both_rows(loop: BackgroundLoop) -> None:
    scored = Scored(loop, threshold=0.5)
    scored.differences[:], scored.short = 0.4, 0.4
    assert not scored.result().is_wrong
    scored.differences[-100:] = 0.6
    assert scored.result().is_wrong
    scored.differences[:], scored.short = 0.0, 0.6
    assert str(scored.result()) == "by 0.6, expected at most 0.5"


def test_a_quantized_engine_may_differ_equally_at_every_distance(loop: BackgroundLoop) -> None:
    scored = Scored(loop, is_quantized=True, dtype=torch.bfloat16)
    scored.differences[:] = 0.5
    assert not scored.result().is_wrong
    scored.differences[WINDOW:] = 1.6
    assert scored.result().is_wrong


class Seen:
    """A trainer whose log π are all -2, and an engine that differs from it by `text` and `image`."""

    ids = PromptIds([5, 6, 9, 9, 9, 7, 8], [ImageSpan(start=2, end=5, digest="0" * 64)])

    def __init__(self, loop: BackgroundLoop, **canary: Any) -> None:
        self.text = self.image = 0.0

        async def score(ids: list[int], *images: Any) -> list[float]:
            assert images == ((self.ids.images,) if len(ids) == len(self.ids) else ()), "text is scored as before"
            scores = [-2.0 + (self.image if images else self.text)] * (len(ids) - 1)
            if images:
                scores[1:4] = [math.nan] * 3
            return scores

        stand_in: Any = SimpleNamespace(name="engine 0", loop=loop, score=score)
        self.engines = ControlPlane([stand_in], 30.0, is_staged=True)
        row = ImageRow(ids=self.ids, score=lambda ids: [-2.0] * 3)
        self.canary = Canary(
            lambda ids: [-2.0] * (len(ids) - 1),
            settings=CanarySettings(image=row),
            **{"dtype": torch.float32, "vocab_size": 100} | canary,
        )

    def result(self) -> CanaryResult:
        return self.canary.compare(self.engines, self.canary.expected(is_long=False))["engine 0"]


def test_a_difference_in_the_row_with_an_image_alone_is_that_of_the_tower(loop: BackgroundLoop) -> None:
    seen = Seen(loop)
    assert (seen.result().image, seen.result().is_wrong) == (0.0, False)
    seen.image = 0.5
    assert seen.result().is_wrong
    assert str(seen.result()) == (
        "by 0.5 in a row with an image, expected at most 0.01, and not in text: it computed the image with other "
        "weights of the vision tower, or kept its features from older ones"
    )
    seen.text = 0.7
    assert str(seen.result()) == "by 0.7, expected at most 0.01"
    seen.text, seen.image = 0.0, math.nan
    assert seen.result().is_wrong


def test_the_row_with_an_image_counts_for_the_floor_of_quantized_engines(loop: BackgroundLoop) -> None:
    seen = Seen(loop, is_quantized=True)
    seen.text, seen.image = 0.1, 0.5
    first = seen.result()
    assert not first.is_wrong
    seen.canary.accept({"engine 0": first})
    assert seen.result().limit == pytest.approx(1.5)
