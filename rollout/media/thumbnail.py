"""Small copies of images, alone and joined, for pages and trackers."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

MAX_SIDE = 160
"""Width or height of a thumbnail, whichever is larger [pixels]."""
GAP = 4
"""Width of the white line between joined images [pixels]."""


def thumbnail(image: Image.Image) -> Image.Image:
    """Return a copy of an image, of at most `MAX_SIDE` pixels in both directions."""
    small = image.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    return small


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Return one image of at least one."""
    width = sum(image.width + GAP for image in images) - GAP
    joined = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        joined.paste(image, (left, 0))
        left += image.width + GAP
    return joined


def one_below_another(images: Sequence[Image.Image]) -> Image.Image:
    """Return one image of at least one."""
    turned = [image.transpose(Image.Transpose.TRANSPOSE) for image in images]
    return side_by_side(turned).transpose(Image.Transpose.TRANSPOSE)
