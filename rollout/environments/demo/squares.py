"""Environment `squares`: a picture with details that are too small for the model, a task of the demo.

A square is in one quarter of the picture. The model reads the picture at a quarter of its size, where the pattern of
the square blurs to its color, and sees the pattern in what the tool `zoom` returns: an image.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message

if TYPE_CHECKING:
    from PIL.Image import Image  # runs without images do not load it

SIDE = 224
"""Width and height of a picture."""
VIEW = 56
"""Width and height of what `zoom` returns, and of a picture as the model of the demo reads it."""
FRAME = 8
"""Width of the black frame of a picture: it shows a model without positions which quarter it sees."""
FADE = 12
"""Distance from the edge of a square at which its pattern has full contrast."""
COLORS = {
    "red": (192, 64, 64),
    "green": (64, 192, 64),
    "blue": (64, 64, 192),
    "yellow": (192, 192, 64),
    "purple": (192, 64, 192),
    "cyan": (64, 192, 192),
}
PATTERNS = ("rows", "columns", "checks", "rising", "falling", "dots")
QUARTERS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
"""Column and row of each quarter of a picture."""


class SquaresEnvironment(ToolEnvironment):
    """`ToolEnvironment` with `zoom` into the picture of column `square`: [left, top, size, color, pattern]."""

    declaration = Declaration(reads="prompt", max_turns=3, demo_task="squares")

    def __init__(self, **settings: Any):
        self._picture: Image | None = None
        super().__init__([self.zoom], **settings)

    def read_row(self, example: Mapping[str, Any]) -> Sequence[Message]:
        try:
            self._picture = draw_picture(example["square"])
        except (TypeError, ValueError, KeyError):
            raise DataError(
                "squares: the row has no square; expected a column square with [left, top, size, color, pattern]"
            ) from None
        return super().read_row(example)

    async def zoom(self, quarter: Literal["top left", "top right", "bottom left", "bottom right"]) -> Any:
        """Look closely at the middle of a quarter of the picture.

        Args:
            quarter: for example top left
        """
        assert self._picture is not None, "reset comes first"
        left, top = (SIDE // 2 * place + (SIDE // 2 - VIEW) // 2 for place in QUARTERS[quarter])
        return self._picture.crop((left, top, left + VIEW, top + VIEW))


def draw_picture(square: Sequence[Any]) -> Image:
    """Return the picture of a square, [left, top, size, color, pattern], on gray in a black frame.

    Raises `KeyError` for an unknown color or pattern, `ValueError` or `TypeError` for other forms.
    """
    from PIL import Image

    pixels = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    pixels[FRAME:-FRAME, FRAME:-FRAME] = 128
    left, top, size, color, pattern = square
    pixels[top : top + size, left : left + size] = _square(size, color, pattern)
    return Image.fromarray(pixels)


@functools.lru_cache(maxsize=512)
def _square(size: int, color: str, pattern: str) -> np.ndarray:
    """Return the (size, size, 3) pixels of a square. Their mean over 4 x 4 of them is its color."""
    y, x = np.mgrid[:size, :size]
    if pattern == "dots":
        lightness = np.where((x % 4 < 2) & (y % 4 < 2), 60, -20)
    else:
        phases = {"rows": y, "columns": x, "rising": x + y, "falling": x - y, "checks": x // 2 * 2 + y // 2 * 2}
        lightness = np.where(phases[pattern] % 4 < 2, 56, -56)
    to_edge = np.minimum(np.minimum(x, y), size - 1 - np.maximum(x, y))
    lightness = lightness * np.minimum(1, to_edge / FADE)  # one that ended at the edge would show in the small picture
    return (np.array(COLORS[color]) + lightness[:, :, None]).round().astype(np.uint8)
