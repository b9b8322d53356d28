"""One image as a model reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedImage:
    """Tensors of exactly one image, as the image processor of the model returns them, for engine and trainer alike."""

    digest: str
    """SHA-256 of the image (`rollout/media/image_files.py`)."""
    tensors: Mapping[str, torch.Tensor]
    """By the name under which the model takes them. Qwen: pixel_values (patches, values) and image_grid_thw (1, 3);
    Gemma 3: pixel_values (1, 3, height, width)."""
    num_tokens: int
    """Number of token ids that stand for the image in a prompt."""
