"""Images of the run for code that gets messages only: reward functions in any process, judges and pages.

    from lockstep.rollout.media.run_images import open_image
    open_image({"type": "image", "digest": ...})  ─► its pixels

Processes that the run starts inherit the folder of the images as an environment variable.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from lockstep.rollout.errors import DataError
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.records import IMAGE_DIGEST, Message, is_stored_image
from lockstep.rollout.safe_text import error_text

FOLDER = "LOCKSTEP_MEDIA"
"""Environment variable with the folder."""
_stores: dict[str, ImageStore] = {}
_temporary: list[TemporaryDirectory[str]] = []
"""Deleted when this process ends."""


def run_store(folder: Path | None) -> ImageStore:
    """Return the store of a run, and let this process, and those that it starts from now on, open its images.

    folder: of the images; None: one that is deleted when this process ends.
    """
    if folder is None:
        _temporary.append(TemporaryDirectory(prefix="lockstep-media-"))
        folder = Path(_temporary[-1].name)
    os.environ[FOLDER] = str(folder.absolute())
    _stores[os.environ[FOLDER]] = ImageStore(folder)
    return _stores[os.environ[FOLDER]]


def open_image(part: Mapping[str, Any]) -> Image.Image:
    """Return the image of a part `{"type": "image", "digest": ...}` of a message or a data row, as a copy in RGB.

    Raises `DataError` outside of a run with images, and if the run has no such image.
    """
    folder = run_folder()
    return _stores.setdefault(str(folder), ImageStore(folder)).image(str(part.get("digest"))).copy()


def image_url(part: Mapping[str, Any]) -> str:
    """Return the image of a part as a data URL of its PNG file. Raises as `open_image`."""
    digest = str(part.get("digest"))
    try:
        if not IMAGE_DIGEST.fullmatch(digest):
            raise OSError("its digest is none")
        content = (run_folder() / f"{digest}.png").read_bytes()
    except OSError as error:
        raise DataError(f"the image {digest[:80]} cannot be read: {error_text(error)}") from error
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def run_images(messages: Iterable[Message]) -> list[Mapping[str, Any]]:
    """Return the parts of messages that are images of the run, each image once, in order."""
    contents = (message.get("content") for message in messages)
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return list({part["digest"]: part for part in parts if is_stored_image(part)}.values())


def run_folder() -> Path:
    """Return the folder of the images. Raises `DataError` outside of a run with images."""
    folder = os.environ.get(FOLDER)
    if not folder:
        raise DataError("no run with images has started in this process; set model.images.max_per_prompt")
    return Path(folder)
