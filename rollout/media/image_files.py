"""Images in parts of messages: read, decoded within limits, and named by a digest of their pixels.

    {"type": "image", "image": <path, bytes, PIL image, data URL, or the {"bytes", "path"} of a `datasets` column>}
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}     OpenAI's form
    {"type": "image", "digest": ...}                                             one that is in the store already

Nothing is downloaded: a prompt must not depend on what another machine answers today.

How an image becomes RGB: transparent pixels show white behind them, as in vLLM's server and in Qwen's own utilities;
transformers drops transparency, which shows hidden colors. Of 16-bit gray values the high byte counts, as
PIL reads 16-bit colors; its own conversion makes all from 255 on white. Values of 32 bits have no known range and are
refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from lockstep.rollout.errors import TemplateError
from lockstep.rollout.safe_text import error_text

MAX_IMAGE_BYTES = 64 * 2**20
"""Size limit of an encoded image."""
MAX_PIXELS = 64 * 2**20
"""Limit of a decoded image: 192 MiB. A small file may decode to gigabytes."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded. PIL knows others, some of which start programs."""


def image_digest(image: Image.Image) -> str:
    """Return the SHA-256 of an RGB image: of its size and its decoded pixels.

    The same picture in two files, or in two formats without loss, is one image.
    """
    digest = hashlib.sha256(f"{image.width}x{image.height} RGB\n".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def read_image(part: Mapping[str, Any], place: str) -> Image.Image:
    """Return the image of a part as RGB, turned as its EXIF orientation says; of an animation the first frame.

    Raises `TemplateError`, which begins with `place`, for an image that cannot be read, is too large, has values of 32
    bits, or has a remote address.
    """
    with _opened(part, place) as image:
        return _as_rgb(image)


def check_image(part: Mapping[str, Any], place: str) -> None:
    """Read format and size of an image from its header; of a file nothing further. Raises as `read_image`."""
    with _opened(part, place) as image:
        _check_header(image)


@contextmanager
def _opened(part: Mapping[str, Any], place: str) -> Iterator[Image.Image]:
    """Open the image of a part, and name the place in errors of the block. Only its header has been read so far."""
    value = part.get(str(part.get("type")))
    if isinstance(value, Mapping) and part.get("type") == "image_url":
        value = value.get("url")
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if not isinstance(value, Image.Image | bytes | bytearray | memoryview | str | Path):
        raise TemplateError(
            f"{place}: the image is of type {type(value).__name__}; expected a path, bytes, a PIL image, or a data URL"
        )
    try:
        if isinstance(value, Image.Image):
            yield value
            return
        with _file(value) as file, Image.open(file, formats=FORMATS) as image:
            yield image
    except UnidentifiedImageError as error:  # whose text may name an object in memory
        raise TemplateError(
            f"{place}: the image cannot be read: cannot identify image file; expected {', '.join(FORMATS)}"
        ) from error
    except Exception as error:  # of many kinds, for damaged files
        raise TemplateError(f"{place}: the image cannot be read: {error_text(error)}") from error


def _file(value: bytes | bytearray | memoryview | str | Path) -> BinaryIO:
    """Return the file of a path, or of bytes or a data URL. Raises ValueError or OSError."""
    if isinstance(value, str) and value.startswith("data:"):
        value = _bytes_of_url(value)
    if isinstance(value, str | Path):
        scheme, separator, _ = str(value).partition("://")
        if separator and isinstance(value, str):
            raise ValueError(f"{scheme}:// addresses are not fetched; give a local path, bytes, or a data URL")
        file: BinaryIO = Path(value).open("rb")  # noqa: SIM115  # the caller closes it
    else:
        file = io.BytesIO(value)
    if file.seek(0, io.SEEK_END) > MAX_IMAGE_BYTES:
        file.close()
        raise ValueError(f"its file is larger than {MAX_IMAGE_BYTES} bytes")
    file.seek(0)
    return file


def _bytes_of_url(text: str) -> bytes:
    """Return what a data URL holds. Raises ValueError."""
    header, comma, data = text.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError("its data URL is not base64; expected data:image/png;base64,...")
    if len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise ValueError(f"its data URL has {len(data)} characters, more than {MAX_IMAGE_BYTES} bytes encode to")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its data URL is not base64 ({error})") from error


def _check_header(image: Image.Image) -> None:
    if not 0 < image.width * image.height <= MAX_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels, expected 1 to {MAX_PIXELS}")
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its values have 32 bits (mode {image.mode}), and their range is not known; save it with 8 or 16 bits"
        )


def _as_rgb(image: Image.Image) -> Image.Image:
    """Return a copy. A size beyond the limit costs nothing, since nothing has been decoded so far."""
    _check_header(image)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        colors = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colors.size, "white"), colors)
    rgb = image.convert("RGB")
    return Image.frombytes("RGB", rgb.size, rgb.tobytes())  # without metadata and a link to the file
