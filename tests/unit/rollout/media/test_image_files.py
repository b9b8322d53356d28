from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lockstep.rollout.errors import TemplateError
from lockstep.rollout.media import image_files
from lockstep.rollout.media.image_files import image_digest, read_image
from tests.fixtures.vision import picture

PICTURE = picture(1, width=6, height=4)


def encoded(image: Image.Image = PICTURE, kind: str = "PNG", **options: Any) -> bytes:
    with io.BytesIO() as buffer:
        image.save(buffer, format=kind, **options)
        return buffer.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_all_forms_of_a_part_are_one_image(tmp_path: Path) -> None:
    path = tmp_path / "a.bmp"
    path.write_bytes(encoded(kind="BMP"))
    parts: list[dict[str, Any]] = [
        *({"type": "image", "image": value} for value in (str(path), path, encoded(), PICTURE, data_url(encoded()))),
        {"type": "image", "image": {"bytes": encoded(), "path": None}},
        {"type": "image", "image": {"bytes": None, "path": str(path)}},
        {"type": "image_url", "image_url": {"url": data_url(encoded())}},
        {"type": "image_url", "image_url": data_url(encoded())},
    ]
    assert {image_digest(read_image(part, "here")) for part in parts} == {image_digest(PICTURE)}


def test_the_digest_is_of_the_pixels_and_the_size() -> None:
    other = PICTURE.copy()
    other.putpixel((0, 0), (1, 2, 3))
    turned = Image.frombytes("RGB", (4, 6), PICTURE.tobytes())
    assert len({image_digest(image) for image in (PICTURE, other, turned)}) == 3


def test_an_image_is_turned_as_its_file_says_and_has_three_colors() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = read_image({"type": "image", "image": encoded(exif=exif)}, "here")
    assert image_digest(turned) == image_digest(PICTURE.transpose(Image.Transpose.ROTATE_270))
    assert read_image({"type": "image", "image": encoded(PICTURE.convert("RGBA"))}, "here").mode == "RGB"
    assert read_image({"type": "image", "image": Image.new("L", (2, 2))}, "here").mode == "RGB"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://a.org/a.png"}},
            "https:// addresses are not fetched",
        ),
        ({"type": "image", "image": "file:///a.png"}, "file:// addresses are not fetched"),
        ({"type": "image", "image": "missing.png"}, "missing.png"),
        ({"type": "image", "image": b"text"}, "cannot identify image file"),
        ({"type": "image", "image": encoded()[:60]}, "cannot be read"),
        ({"type": "image", "image": "data:image/png,abc"}, "not base64"),
        ({"type": "image", "image": "data:image/png;base64,%%"}, "not base64"),
        ({"type": "image", "image": {"bytes": None, "path": None}}, "type NoneType; expected a path"),
        ({"type": "image"}, "type NoneType; expected a path"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused_with_its_place(part: dict[str, Any], says: str) -> None:
    with pytest.raises(TemplateError, match=r"^message 2, part 1: ") as caught:
        read_image(part, "message 2, part 1")
    assert says in str(caught.value)


def test_a_small_file_of_a_large_image_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = encoded(Image.new("1", (9000, 9000)))
    assert len(bomb) < 20_000
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(TemplateError, match="9000 x 9000 pixels, expected 1 to 67108864"):
        read_image({"type": "image", "image": bomb}, "here")


def test_a_large_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(image_files, "MAX_IMAGE_BYTES", 10)
    (tmp_path / "a.png").write_bytes(encoded())
    for value in (encoded(), str(tmp_path / "a.png")):
        with pytest.raises(TemplateError, match="larger than 10 bytes"):
            read_image({"type": "image", "image": value}, "here")
    with pytest.raises(TemplateError, match="more than 10 bytes encode to"):
        read_image({"type": "image", "image": data_url(encoded())}, "here")


def test_formats_that_start_programs_are_not_decoded() -> None:
    with pytest.raises(TemplateError, match="cannot identify image file"):
        read_image({"type": "image", "image": encoded(kind="EPS")}, "here")
