"""Thumbnails of images for pages: small, each once, and a sentence in place of one that cannot be read."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.rollout.errors import DataError, TemplateError
from lockstep.rollout.records import IMAGE_DIGEST, Message, content_text, is_stored_image
from lockstep.rollout.safe_text import error_text, safe_text
from lockstep.rollout.system.plain_files import opened_plain
from lockstep.trainer.observe.transcript import image_mark

if TYPE_CHECKING:
    from PIL import Image

MAX_IMAGES = 100
"""Keeps the images of a page below a megabyte or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """An image of a page; without a `url` only its name."""

    digest: str
    name: str
    """`image 84x112 39eb91…`, without the size if it is not known."""
    url: str = ""
    width: int = 0
    height: int = 0
    """Size of the thumbnail [pixels]."""
    problem: str = ""
    """Why there is no thumbnail."""


class Thumbnails:
    """Thumbnails of one page. The first `MAX_IMAGES` images get one."""

    def __init__(self, read: Callable[[str], Image.Image]) -> None:
        """read: returns the image of a digest, or raises `DataError`."""
        self._read = read
        self._by_digest: dict[str, Thumbnail] = {}

    @property
    def all(self) -> list[Thumbnail]:
        return list(self._by_digest.values())

    @property
    def pictures(self) -> list[Thumbnail]:
        return [one for one in self.all if one.url]

    @property
    def note(self) -> str:
        """A sentence on what the page does not show; "" if it shows all."""
        missing = [one for one in self.all if one.problem]
        num_missing, num_images = len(missing), len(self._by_digest)
        num_left_out = num_images - len(self.pictures) - num_missing
        reasons = [f"{num_missing} cannot be read ({missing[0].problem})"] if missing else []
        reasons += [f"{num_left_out} are left out: a page shows at most {MAX_IMAGES}"] if num_left_out else []
        return f"Of {num_images} images, {', and '.join(reasons)}. They appear by name." if reasons else ""

    def of(self, digest: str) -> Thumbnail:
        """Return the thumbnail of an image, or its name where it cannot be read or the page is full."""
        if digest not in self._by_digest:
            self._by_digest[digest] = self._make(digest)
        return self._by_digest[digest]

    def pieces(self, message: Message) -> list[str | Thumbnail]:
        """Return texts and images of a message, in order."""
        content = message.get("content")
        if not isinstance(content, list | tuple) or not any(map(is_stored_image, content)):
            return [content_text(message)]
        return [
            self.of(part["digest"]) if is_stored_image(part) else content_text({"content": [part]}) for part in content
        ]

    def _make(self, digest: str) -> Thumbnail:
        from lockstep.rollout.media.thumbnail import thumbnail  # pages without images do not load it

        name = safe_text(image_mark({"type": "image", "digest": digest})[1:-1], 40)
        if len(self.pictures) >= MAX_IMAGES:
            return Thumbnail(digest=digest, name=name)
        try:
            image = self._read(digest)
        except DataError as error:
            return Thumbnail(digest=digest, name=name, problem=safe_text(str(error), 200))
        small = thumbnail(image)
        file = io.BytesIO()
        small.save(file, format="JPEG", quality=85)
        return Thumbnail(
            digest=digest,
            name=sized_name(image, digest),
            url=f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}",
            width=small.width,
            height=small.height,
        )


def sized_name(image: Image.Image, digest: str) -> str:
    return f"image {image.width}x{image.height} {digest[:6]}…"


def saved_image(media: Path, digest: str) -> Image.Image:
    """Return an image of a run that others may have written. Raises `DataError` without it, or if the file is another.

    media: folder of the run's images.
    """
    from lockstep.rollout.media.image_files import MAX_IMAGE_BYTES, image_digest, read_image

    if not IMAGE_DIGEST.fullmatch(digest):
        raise DataError("its digest is none")
    try:
        with opened_plain(media / f"{digest}.png") as file:
            image = read_image({"type": "image", "image": file.read(MAX_IMAGE_BYTES + 1)}, "its file")
    except FileNotFoundError as error:
        raise DataError("its file is not in the run's folder media") from error
    except OSError as error:
        raise DataError(f"its file cannot be read: {error_text(error)}") from error
    except TemplateError as error:
        raise DataError(str(error)) from error
    if image_digest(image) != digest:
        raise DataError("its file holds another image")
    return image


def run_image(digest: str) -> Image.Image:
    """Return an image of the run of this process. Raises `DataError`."""
    from lockstep.rollout.media.run_images import run_folder

    return saved_image(run_folder(), digest)


def sized_mark(media: Path) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that writes an image of a run with its size: `[image 84x112 39eb91…]`; and without, if it
    cannot be read."""

    def mark(part: Mapping[str, Any]) -> str:
        if not is_stored_image(part):
            return image_mark(part)
        try:
            return f"[{sized_name(saved_image(media, part['digest']), part['digest'])}]"
        except DataError as error:
            return f"{image_mark(part)[:-1]}: {error}]"

    return mark
