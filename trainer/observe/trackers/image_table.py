"""Table of rollouts with the images of each: thumbnails side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.rollout.records import Rollout
from lockstep.trainer.observe.trackers.tracker import Table

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGES = 16
"""Maximum number of images that are shown of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    image: Image.Image
    caption: str
    """Beginnings of the digests from left to right, as the texts of the table have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTable(Table):
    strips: Sequence[Strip | None]
    """One for each row; None for a row without an image that can be read."""


def strip_of(rollout: Rollout, tolerating: Callable[[str], AbstractContextManager[None]]) -> Strip | None:
    """Return the images of a rollout, each once, in order. One that cannot be read is left out; the caption says so."""
    from lockstep.rollout.media.run_images import open_image, run_images  # tables of other runs do not load it
    from lockstep.rollout.media.thumbnail import side_by_side, thumbnail

    parts = run_images(rollout.messages)
    small, names = [], []
    for part in parts[:MAX_IMAGES]:
        names.append(f"{part['digest'][:6]}… (cannot be read)")
        with tolerating("an image in media/rollouts"):
            small.append(thumbnail(open_image(part)))
            names[-1] = f"{part['digest'][:6]}…"
    names += [f"{len(parts) - MAX_IMAGES} more"] * (len(parts) > MAX_IMAGES)
    return Strip(image=side_by_side(small), caption=", ".join(names)) if small else None
