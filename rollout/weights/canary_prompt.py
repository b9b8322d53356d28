"""The prompt with an image of the canary of a weight sync (`rollout/weights/canary.py`)."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from lockstep.rollout.media.processing import ImageProcessing
from lockstep.rollout.records import ImageSpan, PromptIds
from lockstep.rollout.weights.canary import ImageRow, canary_ids

SIZE = 224, 168
"""Pixels of the image: 48 tokens of Qwen2.5-VL."""
IDS_BEFORE = 4
"""Ids before the image. The others see it, and so the vision tower."""


def canary_prompt(images: ImageProcessing, vocab_size: int | None = None) -> PromptIds:
    """Return ids that are spread over the vocabulary, with an image of color gradients, which goes into the store.

    vocab_size: number of ids; None: those of the images' model.
    """
    linear, radial = Image.linear_gradient("L"), Image.radial_gradient("L")
    pattern = Image.merge("RGB", (linear, linear.rotate(90), radial)).crop((0, 0, *SIZE))
    image = images.prepared(images.store.add(pattern))
    ids = [token for token in canary_ids(vocab_size or images.vocab_size) if token not in images.reserved_ids]
    opening, closing = images.around_ids
    before = [*ids[:IDS_BEFORE], opening]
    span = ImageSpan(start=len(before), end=len(before) + image.num_tokens, digest=image.digest)
    return PromptIds(
        [*before, *[images.image_token_id] * image.num_tokens, closing, *ids[IDS_BEFORE:]],
        [span],
    )


def image_row(images: ImageProcessing, score: Callable[[PromptIds], list[float]]) -> ImageRow:
    """Return the row of the canary with an image. score: see `ImageRow`."""
    return ImageRow(ids=canary_prompt(images), score=score, avoided=images.reserved_ids)
