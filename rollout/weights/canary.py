"""Canary of a weight sync: rows that engine and trainer both score, and whose log-probabilities agree up to rounding.

The short row detects wrong weights. The long one passes the lengths at which a model begins to compute in another way
(windows, chunks, original lengths of rotary positions), where the two programs may part although their weights are
equal. Each of its stretches is judged by its median: a token whose router rounds to another expert says nothing. What
rounding explains is measured on the same row: the trainer scores it again with a rounding error added to the output of
each layer.

A run that sees images has a row with an image, the same after each sync: it detects a vision tower that did not arrive,
and features of the image that the engine kept from older weights (vLLM's encoder cache). Tokens of the image are not
compared, because the trainer does not score them.

None detects weights one small update old: for these the engine refuses updates with missing parameters, and the version
is read back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.rollout.engine.protocol import SyncedEngine
from lockstep.rollout.errors import SyncError
from lockstep.rollout.records import ImageSpan, PromptIds
from lockstep.rollout.weights.control_plane import ControlPlane

if TYPE_CHECKING:
    from lockstep.rollout.weights.whole.distributions import WholeResult, WholeRow

ScoreCanary = Callable[[list[int]], list[float]]
"""The trainer's log π(ids[i] | ids[:i]) at temperature 1 for i >= 1, without gradients. Called on every rank, as a
collective under ZeRO-3, in a separate thread (so an autocast context must be entered inside)."""

CANARY_TOKENS = 24
CANARY_THRESHOLD: Mapping[torch.dtype, float] = {torch.float32: 1e-2, torch.bfloat16: 1.0, torch.float16: 0.5}
"""Largest accepted |Δ log π| of the short row, by the engine's dtype. Measured on random models: 1e-5 in float32, 0.2
in bfloat16; 2 to 10 with a head that was not reloaded."""
ROUNDINGS = 10.0
"""Accepted median of a stretch of the long row, as a multiple of the effect of one rounding error per layer."""
SMALLEST_MEDIAN: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 4e-3}
"""Median that is accepted in any model [nats]."""
MIN_STRETCH = 16
"""Tokens of the shortest stretch."""
QUANTIZED_THRESHOLD, FLOOR_FACTOR = 2.0, 3.0
"""Thresholds of quantized engines: largest accepted |Δ log π| of the first canary, and of later ones as a multiple of
the first, but no less than for their dtype. The same multiple holds for the stretches of the long row, of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRow:
    """The long row of a canary."""

    tokens: int
    score_disturbed: ScoreCanary
    """The trainer's scores with a rounding error added to the output of each layer."""
    distances: tuple[int, ...] = ()
    """Lengths [tokens] at which the model begins to compute in another way, all below `tokens`."""

    @property
    def stretches(self) -> list[int]:
        """Numbers of scored tokens of the stretches, which begin at the distances and after each quarter of the row."""
        ends = sorted({*self.distances, *(self.tokens * quarter // 4 for quarter in (1, 2, 3)), self.tokens})
        starts = [1]
        for end in ends[:-1]:
            if end - starts[-1] >= MIN_STRETCH and self.tokens - end >= MIN_STRETCH:
                starts.append(end)
        return [end - start for start, end in zip(starts, [*starts[1:], self.tokens], strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow:
    """The row of a canary with an image."""

    ids: PromptIds
    """Ids and images (`rollout/weights/canary_prompt.py`)."""
    score: Callable[[PromptIds], list[float]]
    """The trainer's scores of the ids behind the first that are no tokens of images, called as `ScoreCanary`."""

    avoided: frozenset[int] = frozenset()
    """Ids that rows of text must not have: they would stand for an image that is not there."""

    @property
    def scored(self) -> list[int]:
        """Indices of those ids among the engine's scores."""
        of_images = {place for image in self.ids.images for place in range(image.start, image.end)}
        return [place - 1 for place in range(1, len(self.ids)) if place not in of_images]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """Rows and limits of a canary."""

    threshold: float | None = None
    """Largest accepted |Δ log π| of all rows; None: by dtype, rounding and quantization."""
    share: float = 1.0
    """A canary is scored when the last one cost at most this share of the time since. 1: always. The long row is scored
    when it cost at most LONG_SHARE and this share."""
    long: LongRow | None = None
    """None: only the short row is scored."""
    image: ImageRow | None = None
    """None: a run without images. Scored as often as the short row, with its limit."""
    whole: WholeRow | None = None
    """None: the distributions over the vocabulary are not compared."""


SHORT_ROW = CanarySettings()
"""A canary with the short row after each sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medians:
    """Medians of |Δ log π| over the stretches of the long row, of one engine [nats]."""

    differences: tuple[float, ...]
    limits: tuple[float, ...]
    row: LongRow

    @property
    def worst(self) -> int:
        """Index of the stretch with the largest difference relative to its limit; NaN is the largest."""
        ratios = [one / limit for one, limit in zip(self.differences, self.limits, strict=True)]
        return max(range(len(ratios)), key=lambda index: math.inf if math.isnan(ratios[index]) else ratios[index])

    @property
    def is_wrong(self) -> bool:
        return not self.differences[self.worst] <= self.limits[self.worst]  # negated, so that NaN fails

    def __str__(self) -> str:
        lengths, worst = self.row.stretches, self.worst
        first = 1 + sum(lengths[:worst])
        edges = [distance for distance in self.row.distances if distance <= first]
        beyond = f", beyond {edges[-1]}, where the model begins to compute in another way" if edges else ""
        return (
            f"by {self.differences[worst]:.3g} in the median of tokens {first} to {first + lengths[worst] - 1} of a row"
            f"{beyond}, expected at most {self.limits[worst]:.3g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """Differences of one engine from the trainer."""

    short: float
    """Largest |Δ log π| of the short row."""
    limit: float
    long: Medians | None
    """None: the long row was not scored."""
    image: float | None = None
    """Largest |Δ log π| of the row with an image; None: there is none."""
    whole: WholeResult | None = None
    """None: the distributions over the vocabulary were not compared."""

    @property
    def is_wrong(self) -> bool:
        further = any(part is not None and part.is_wrong for part in (self.long, self.whole))
        return not self.short <= self.limit or self.is_image_wrong or further

    @property
    def is_image_wrong(self) -> bool:
        return self.image is not None and not self.image <= self.limit  # negated, so that NaN fails

    @property
    def is_wrong_for_images_alone(self) -> bool:
        """True if the vision tower is at fault, or what was kept of it."""
        return self.is_image_wrong and self.short <= self.limit

    def __str__(self) -> str:
        if self.is_wrong_for_images_alone:
            return (
                f"by {self.image:.3g} in a row with an image, expected at most {self.limit:g}, and not in text: it "
                "computed the image with other weights of the vision tower, or kept its features from older ones"
            )
        parts = [part for part in (self.long, self.whole) if part is not None]
        if self.short <= self.limit and parts:
            return str(next((part for part in parts if part.is_wrong), parts[0]))
        return f"by {self.short:.3g}, expected at most {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The trainer's log π of the tokens of the rows, float64."""

    short: Tensor
    long: Tensor | None = None
    rounding: Tensor = field(default_factory=lambda: torch.empty(0))
    """|Δ log π| of the long row by rounding errors."""
    image: Tensor | None = None
    whole: tuple[Tensor, Tensor] | None = None
    """Logits of the short row over the vocabulary, without and with rounding errors."""


class Canary:
    """The rows of a canary, and the differences that are accepted.

    Args:
        score: the trainer's scores.
        dtype, vocab_size: of the engines.
        is_quantized: True for quantized engines, whose own first difference is the measure of later ones.
        settings: rows and limits.
    """

    def __init__(
        self,
        score: ScoreCanary,
        *,
        dtype: torch.dtype,
        vocab_size: int,
        is_quantized: bool = False,
        settings: CanarySettings = SHORT_ROW,
    ) -> None:
        threshold, long = settings.threshold, settings.long
        self._score = score
        self._dtype = dtype
        avoided = settings.image.avoided if settings.image else ()
        self._ids = [0 if token in avoided else token for token in canary_ids(vocab_size)]
        self._is_fixed = threshold is not None
        self._threshold = CANARY_THRESHOLD[dtype] if threshold is None else threshold
        self._is_quantized = is_quantized and not self._is_fixed
        self._measures_floor = self._is_quantized
        """True until the first canary of quantized engines, which sets the threshold of the others."""
        self.long, self._image, self.whole = long, settings.image, settings.whole
        generator = torch.Generator().manual_seed(0)
        long_ids = torch.randint(vocab_size, (long.tokens,), generator=generator).tolist() if long else []
        self._long_ids = [0 if token in avoided else token for token in long_ids]

    def expected(self, *, is_long: bool) -> Expected:
        """Score the rows by the trainer; a collective under ZeRO-3. is_long: both rows."""
        short = _scores(self._score, self._ids)
        image = None if self._image is None else _scores(self._image.score, self._image.ids)
        whole = self.whole.expected(self._ids) if self.whole is not None and self.whole.is_due else None
        if not is_long:
            return Expected(short=short, image=image, whole=whole)
        assert self.long is not None
        long, disturbed = _scores(self._score, self._long_ids), _scores(self.long.score_disturbed, self._long_ids)
        return Expected(short=short, long=long, rounding=(long - disturbed).abs(), image=image, whole=whole)

    def compare(self, engines: ControlPlane, expected: Expected) -> dict[str, CanaryResult]:
        """Score the rows by this rank's engines, and return their differences by name."""
        short = self._differences(engines, self._ids, expected.short)
        limit = max(QUANTIZED_THRESHOLD, self._threshold) if self._measures_floor else self._threshold
        long = {} if expected.long is None else self._differences(engines, self._long_ids, expected.long)
        image: dict[str, Tensor] = {}
        if self._image is not None and expected.image is not None:
            row = self._image
            image = self._differences(engines, row.ids, expected.image, images=row.ids.images, scored=row.scored)
        whole: Mapping[str, WholeResult] = {}
        if self.whole is not None and expected.whole is not None:
            factor = FLOOR_FACTOR if self._is_quantized else ROUNDINGS
            limits: Any = {"threshold": limit if self._is_fixed else None, "least": SMALLEST_MEDIAN[self._dtype]}
            limits |= {"factor": factor, "is_quantized": self._is_quantized}
            whole = self.whole.compare(engines, self._ids, expected.whole, **limits)
        return {
            name: CanaryResult(
                short=one.max().item(),
                limit=limit,
                long=self._medians(long[name], expected.rounding) if name in long else None,
                image=image[name].max().item() if name in image else None,
                whole=whole.get(name),
            )
            for name, one in short.items()
            if name in engines.names  # and was not lost since
        }

    def accept(self, results: Mapping[str, CanaryResult]) -> None:
        """Take the differences of the first canary of quantized engines as the floor of later ones."""
        if results and self._measures_floor:
            floor = max(max(one.short, one.image or 0.0) for one in results.values())
            self._threshold = max(self._threshold, FLOOR_FACTOR * floor)
            self._measures_floor = False

    def _medians(self, differences: Tensor, rounding: Tensor) -> Medians:
        assert self.long is not None
        parts = (one.split(self.long.stretches) for one in (differences, rounding))
        medians, roundings = ([part.median().item() for part in one] for one in parts)
        limits = [max(SMALLEST_MEDIAN[self._dtype], ROUNDINGS * one) for one in roundings]
        if self._is_quantized:
            limits = [max(limit, FLOOR_FACTOR * medians[0]) for limit in limits]
            limits[0] = max(limits[0], QUANTIZED_THRESHOLD)
        if self._is_fixed:
            limits = [self._threshold] * len(limits)
        return Medians(differences=tuple(medians), limits=tuple(limits), row=self.long)

    def _differences(
        self,
        engines: ControlPlane,
        ids: Sequence[int],
        expected: Tensor,
        *,
        images: Sequence[ImageSpan] = (),
        scored: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Return |Δ log π| of each engine, by name. scored: indices of the engine's scores; None: all."""

        async def difference(engine: SyncedEngine) -> Tensor:
            scores = await (engine.score(ids, images) if images else engine.score(ids))
            engine_scores = torch.tensor(scores, dtype=torch.float64)
            engine_scores = engine_scores if scored is None else engine_scores[list(scored)]
            if expected.shape != engine_scores.shape:
                raise SyncError(
                    f"canary: the trainer scored {len(expected)} tokens, {engine.name} {len(engine_scores)}"
                )
            return (expected - engine_scores).abs()

        differences = engines.all(difference)
        return dict(zip(engines.names, differences, strict=True))


class Pace:
    """Cost of the last canary with a row, and the time since."""

    def __init__(self) -> None:
        self._cost_s, self._ended_at = 0.0, 0.0

    def is_due(self, share: float) -> bool:
        return share == 1 or self._cost_s <= share * (time.perf_counter() - self._ended_at)

    def ended(self, cost_s: float) -> None:
        self._cost_s, self._ended_at = cost_s, time.perf_counter()


def _scores(score: Callable[[Any], list[float]], ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return torch.tensor(score(ids if isinstance(ids, PromptIds) else list(ids)), dtype=torch.float64)


def canary_ids(vocab_size: int) -> list[int]:
    """Return ids spread over the vocabulary in an unnatural order."""
    step = max(1, int(vocab_size * 0.618))
    return [(7 + index * step) % vocab_size for index in range(CANARY_TOKENS)]
