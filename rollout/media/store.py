"""Images of a run by digest: each once in memory, and once on disk where there is a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import get_ident

from PIL import Image

from lockstep.rollout.errors import DataError
from lockstep.rollout.media.bounded_cache import BoundedCache
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.safe_text import error_text

UNREADABLE = "unreadable: "
"""Beginning of what stands for the digest of an image that could not be decoded; the cause follows."""
KEPT_BYTES = 2**30
"""Pixels in memory of a store with a folder, the most recently used; without a folder all are kept."""


class ImageStore:
    """Images by digest. Threads may share it."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: keeps the images as PNG files; processes may share it. It is made with the first image."""
        self._folder = folder
        self._images = BoundedCache(
            self._read,
            size=lambda image: 3 * image.width * image.height,
            limit=sys.maxsize if folder is None else KEPT_BYTES,
        )

    def add(self, image: Image.Image) -> str:
        """Keep an RGB image and return its digest. Raises OSError if it cannot be written."""
        digest = image_digest(image)
        path = None if self._folder is None else self._folder / f"{digest}.png"
        if path is not None and digest not in self._images and not path.exists():
            _write(image, path)
        self._images.keep(digest, image)
        return digest

    def image(self, digest: str) -> Image.Image:
        """Return the image. Raises `DataError` if it is not there, or its file holds another one."""
        return self._images(digest)

    def _read(self, digest: str) -> Image.Image:
        if digest.startswith(UNREADABLE):
            raise DataError(digest.removeprefix(UNREADABLE))
        if self._folder is None or not (len(digest) == 64 and set(digest) <= set("0123456789abcdef")):
            raise DataError(f"no image has the digest {digest[:80]!r}")
        path = self._folder / f"{digest}.png"
        try:
            with Image.open(path, formats=("PNG",)) as file:
                image = file.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} holds no image: {error_text(error)}") from error
        if image_digest(image) != digest:
            raise DataError(f"{path} holds another image than its name says; restore it from a copy of the run")
        return image


def _write(image: Image.Image, path: Path) -> None:
    """Write a file that readers find whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}-{get_ident()}.partial")
    try:
        with partial.open("wb") as file:
            image.save(file, format="PNG", compress_level=1)  # episodes wait for it
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
