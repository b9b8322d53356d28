"""An image as a model takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedImage:
    """One image after the image processor of the model."""

    digest: str
    """SHA-256 in hexadecimal digits, as in `ImageSpan`."""
    tensors: Mapping[str, torch.Tensor]
    """Output of the processor for this image alone. Qwen-VL: `pixel_values` (patches, values of a patch) and
    `image_grid_thw` (1, 3); Gemma 3: `pixel_values` (1, 3, height, width)."""
    num_tokens: int
    """Number of tokens that stand for it in a prompt."""
