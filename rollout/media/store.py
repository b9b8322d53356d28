"""Images of a run by digest: each once in memory, and once on disk where there is a folder."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from PIL import Image

from lockstep.rollout.errors import DataError
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.safe_text import error_text

KEPT_IMAGES = 256
"""Images in memory of a store with a folder, the most recently used; without a folder all are kept."""


class ImageStore:
    """Images by digest. Threads may share it."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: keeps the images as PNG files; processes may share it. It is made with the first image."""
        self._folder = folder
        self._images: OrderedDict[str, Image.Image] = OrderedDict()
        self._lock = Lock()

    def add(self, image: Image.Image) -> str:
        """Keep an RGB image and return its digest. Raises OSError if it cannot be written."""
        digest = image_digest(image)
        with self._lock:
            is_new = digest not in self._images
        if is_new and self._folder is not None and not (path := self._folder / f"{digest}.png").exists():
            _write(image, path)
        self._keep(digest, image)
        return digest

    def image(self, digest: str) -> Image.Image:
        """Return the image. Raises `DataError` if it is not there, or its file holds another one."""
        with self._lock:
            if digest in self._images:
                self._images.move_to_end(digest)
                return self._images[digest]
        image = self._read(digest)
        self._keep(digest, image)
        return image

    def _keep(self, digest: str, image: Image.Image) -> None:
        with self._lock:
            self._images[digest] = image
            self._images.move_to_end(digest)
            if self._folder is not None and len(self._images) > KEPT_IMAGES:
                self._images.popitem(last=False)

    def _read(self, digest: str) -> Image.Image:
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
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            image.save(file, format="PNG")
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)
