"""Odd images: the right pixels or a sentence, never another picture and never another error."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.rollout.errors import TemplateError
from lockstep.rollout.media.image_files import image_digest, read_image
from tests.fixtures.vision import image_processing, picture, save_tiny

PICTURE = picture(1, width=20, height=12)
RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)


def encoded(image: Image.Image = PICTURE, kind: str = "PNG", **options: Any) -> bytes:
    with io.BytesIO() as buffer:
        image.save(buffer, format=kind, **options)
        return buffer.getvalue()


def read(value: Any) -> Image.Image:
    return read_image({"type": "image", "image": value}, "here")


def png(width: int, height: int, *, bits: int, color: int, rows: bytes) -> bytes:
    """Make a PNG of kinds that PIL does not write. color: its color type."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    )


def gray16(kind: str, order: str = "<") -> bytes:
    return encoded(Image.fromarray(np.array([[0, 255, 256, 0x8000, 0xFFFF]], dtype=f"{order}u2")), kind)


def palette(transparency: int | bytes) -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([*RED, *GREEN])
    image.putpixel((1, 0), 1)
    return encoded(image, transparency=transparency)


def bits() -> bytes:
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    return encoded(image)


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(Image.frombytes("RGB", (2, 1), bytes([*RED, *GREEN])), "PNG", exif=exif)


PIXELS: dict[str, tuple[Callable[[], bytes], list[tuple[int, int, int]]]] = {
    "gray": (lambda: encoded(Image.new("L", (1, 1), 77)), [(77, 77, 77)]),
    "1 bit": (bits, [(0, 0, 0), WHITE]),
    "palette, one color transparent": (lambda: palette(0), [WHITE, GREEN]),
    "palette, colors half transparent": (lambda: palette(b"\x80\xff"), [(255, 127, 127), GREEN]),
    "16-bit gray PNG": (lambda: gray16("PNG"), [(v, v, v) for v in (0, 0, 1, 128, 255)]),
    "16-bit gray TIFF": (lambda: gray16("TIFF"), [(v, v, v) for v in (0, 0, 1, 128, 255)]),
    "16-bit gray TIFF, high byte first": (lambda: gray16("TIFF", ">"), [(v, v, v) for v in (0, 0, 1, 128, 255)]),
    "16-bit color PNG": (
        lambda: png(1, 1, bits=16, color=2, rows=b"\0" + struct.pack(">HHH", 0xFF00, 0x8000, 1)),
        [(255, 128, 0)],
    ),
    "transparent": (lambda: encoded(Image.new("RGBA", (1, 1), (10, 20, 30, 0))), [WHITE]),
    "half transparent": (lambda: encoded(Image.new("RGBA", (1, 1), (255, 0, 0, 128))), [(255, 127, 127)]),
    "opaque": (lambda: encoded(Image.new("RGBA", (1, 1), (10, 20, 30, 255))), [(10, 20, 30)]),
    "gray with alpha": (lambda: encoded(Image.new("LA", (1, 1), (10, 0))), [WHITE]),
    "transparent WebP": (lambda: encoded(Image.new("RGBA", (1, 1), (9, 9, 9, 0)), "WEBP", lossless=True), [WHITE]),
    "one color of RGB transparent": (
        lambda: encoded(Image.frombytes("RGB", (2, 1), bytes([*RED, *GREEN])), transparency=RED),
        [WHITE, GREEN],
    ),
    "turned by half": (lambda: turned(3), [GREEN, RED]),
    "mirrored": (lambda: turned(2), [GREEN, RED]),
    "1 x 1": (lambda: encoded(Image.new("RGB", (1, 1), RED)), [RED]),
}


@pytest.mark.parametrize("name", PIXELS)
def test_pixels(name: str) -> None:
    make, expected = PIXELS[name]
    image = read(make())
    assert image.mode == "RGB"
    assert [image.getpixel((x, 0)) for x in range(image.width)] == expected


def test_a_jpeg_in_four_inks() -> None:
    assert read(encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG")).getpixel((0, 0)) == (0, 255, 255)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, GREEN)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    with Image.open(io.BytesIO(data)) as file:
        assert getattr(file, "n_frames", 1) == 2
        file.seek(1)
        assert image_digest(read(data)) == image_digest(frames[0])
        assert image_digest(read(file)) == image_digest(frames[1]), "an image in memory is what it shows"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"", "cannot identify image file; expected PNG, JPEG, WEBP, GIF, BMP, TIFF"),
        (b"what is it?", "cannot identify image file"),
        (b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>', "cannot identify image file"),
        (b"\0\0\0\x18ftypheic\0\0\0\0heicmif1" + bytes(64), "cannot identify image file"),
        (encoded(Image.new("F", (2, 2)), "TIFF"), r"32 bits \(mode F\).* save it with 8 or 16 bits"),
        (encoded(Image.new("I", (2, 2)), "TIFF"), r"32 bits \(mode I\)"),
        (Image.new("F", (2, 2)), r"32 bits \(mode F\)"),
        (Image.new("RGB", (0, 5)), "0 x 5 pixels, expected 1 to"),
        (png(2**31 - 1, 2**31 - 1, bits=1, color=0, rows=b""), "exceeds limit"),
        (png(30_000, 40_000, bits=8, color=2, rows=b""), "exceeds limit"),
        (png(1, 0, bits=8, color=2, rows=b""), "here: the image cannot be read"),
        (encoded()[:-40], "truncated|broken"),
    ],
)
def test_a_sentence(value: Any, says: str) -> None:
    with pytest.raises(TemplateError, match=says) as caught:
        read(value)
    assert " object at 0x" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_file_that_ends_early_is_not_another_picture(kind: str) -> None:
    data = encoded(kind=kind)
    whole = image_digest(read(data))
    refused = 0
    for length in range(len(data)):
        try:
            assert image_digest(read(data[:length])) == whole
        except TemplateError:
            refused += 1
    assert refused > len(data) // 2


@pytest.mark.filterwarnings("ignore")  # of PIL, on tags
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_damaged_file_is_an_image_or_a_sentence(kind: str) -> None:
    rng = np.random.default_rng(0)
    data = encoded(kind=kind)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for place in rng.integers(0, min(len(data), 200), 4):
            damaged[place] = rng.integers(256)
        try:
            assert read(bytes(damaged)).mode == "RGB"
        except TemplateError:
            refused += 1
    assert refused


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny(name, tmp_path_factory.mktemp(name)) for name in ("qwen2_5_vl", "gemma3")}


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1), (1, 150), (3, 2)])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_narrow_images_have_as_many_tokens_as_their_tensors_or_are_refused(
    models: dict[str, Path], name: str, size: tuple[int, int]
) -> None:
    images = image_processing(models[name])
    message = {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", size, RED)}]}
    if name == "qwen2_5_vl" and max(size) == 10_000:
        with pytest.raises(TemplateError, match=f"^message 0, part 0: .*refuses an image of {size[0]} x {size[1]} pix"):
            images.with_digests([message])
        return
    prompt = images.expanded([images.image_token_id], images.with_digests([message]))
    prepared = images.prepared(prompt.images[0].digest)
    if name == "gemma3":
        assert prepared.tensors["pixel_values"].shape == (1, 3, 112, 112)
        assert len(prompt) == 16
    else:
        assert len(prepared.tensors["pixel_values"]) == int(prepared.tensors["image_grid_thw"].prod())
        assert len(prompt) == len(prepared.tensors["pixel_values"]) // 4
