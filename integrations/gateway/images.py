"""Images of requests, in the forms of all APIs, replaced by their digests before anything else reads the request.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}                  chat completions
    {"type": "input_image", "image_url": "data:image/png;base64,..."}                         Responses
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ...}}   Messages
    {"type": "image", "digest": ...}                                                          of the data row, in each

An agent sends all images with each request. Each is decoded once, and conversations are compared by the pixels.

Not covered: addresses, which other machines would be asked for, and ids of uploaded files.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from lockstep.integrations.gateway.errors import ApiError, checked, not_supported, quoted
from lockstep.integrations.gateway.messages import IMAGE_PARTS, StoredImage
from lockstep.rollout.errors import ConfigError, LockstepError
from lockstep.rollout.media.image_files import read_image
from lockstep.rollout.media.processing import ImageProcessing
from lockstep.rollout.safe_text import without_addresses

KEPT_DIGESTS = 2**15
_SENDS_DATA = "nothing is fetched; send the image as data, in base64"


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """Place of an image in the JSON of a request."""

    parts: list[Any]
    index: int
    where: str

    @property
    def part(self) -> dict[str, Any]:
        return self.parts[self.index]


def find_images(body: Mapping[str, Any]) -> list[ImagePlace]:
    """Return the images in the messages of a request, or in its items."""
    places: list[ImagePlace] = []
    for field in ("messages", "input"):
        items = body.get(field)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            for name in ("content", "output") if isinstance(item, dict) else ():
                places += _in_parts(item.get(name), f"{field}[{index}].{name}")
    return places


def _in_parts(parts: Any, where: str) -> Iterator[ImagePlace]:
    for index, part in enumerate(parts if isinstance(parts, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS:
            yield ImagePlace(parts, index, f"{where}[{index}]")
        elif kind == "tool_result":
            yield from _in_parts(part.get("content"), f"{where}[{index}].content")


class RequestImages:
    """Reader of the images of requests. Threads may share it."""

    def __init__(self, images: ImageProcessing) -> None:
        self._images = images
        self._digests: OrderedDict[bytes, str] = OrderedDict()
        """By hashes of the texts that clients sent, the most recently used at the end."""
        self._lock = Lock()

    def store(self, places: Sequence[ImagePlace]) -> None:
        """Put images into the store, and their digests in their places.

        Raises `ApiError` (400) for an image that is not data, cannot be read, or is not one that the model takes, and
        `ConfigError` if one cannot be stored.
        """
        for place in places:
            digest = self._digest(place.part, place.where)
            place.parts[place.index] = StoredImage(type="image", digest=digest)

    def _digest(self, part: Mapping[str, Any], where: str) -> str:
        if isinstance(part.get("digest"), str):
            return self._prepared(part["digest"], where)
        text = _data_url(part, where)
        key = hashlib.blake2b(text.encode(), digest_size=32).digest()
        with self._lock:
            if key in self._digests:
                self._digests.move_to_end(key)
                return self._digests[key]
        digest = self._prepared(self._add(text, where), where)
        with self._lock:
            self._digests[key] = digest
            if len(self._digests) > KEPT_DIGESTS:
                self._digests.popitem(last=False)
        return digest

    def _add(self, url: str, where: str) -> str:
        try:
            image = read_image({"type": "image", "image": url}, where)
        except LockstepError as error:
            raise _unreadable(str(error), where) from error
        try:
            return self._images.store.add(image)
        except OSError as error:
            raise ConfigError(f"an image of a request cannot be stored: {error}") from error

    def _prepared(self, digest: str, where: str) -> str:
        try:
            return self._images.prepared(digest).digest
        except LockstepError as error:
            raise _unreadable(f"{where}: {error}", where) from error


def _data_url(part: Mapping[str, Any], where: str) -> str:
    """Return the data URL of an image in the form of some API. Raises `ApiError` (400)."""
    kind = part["type"]
    if part.get("file_id") is not None:
        raise not_supported(f"{where}.file_id", why=f"the gateway keeps no files; {_SENDS_DATA}")
    if kind == "image":
        source = checked(part.get("source"), dict, f"{where}.source", expected="an object with a type")
        if source.get("type") != "base64":
            raise not_supported(
                f"{where}.source.type", why=f"found {quoted(source.get('type'))}, expected 'base64': {_SENDS_DATA}"
            )
        return f"data:;base64,{checked(source.get('data'), str, f'{where}.source.data', expected='base64')}"
    holder, name, of = part, "image_url", where
    if kind == "image_url":
        of, name = f"{where}.image_url", "url"
        holder = checked(part.get("image_url"), dict, of, expected='{"url": "data:image/png;base64,..."}')
    at = f"{of}.{name}"
    url: str = checked(holder.get(name), str, at, expected="a data URL")
    if holder.get("detail") not in (None, "auto", "high"):
        raise not_supported(
            f"{of}.detail",
            why=f"found {quoted(holder['detail'])}; the image processor of the model decides what is read of an image: "
            "leave it out, or send 'auto' or 'high'; send a smaller image for fewer tokens",
        )
    if not url.startswith("data:"):
        raise not_supported(at, why=f"found {quoted(url)}, expected 'data:image/png;base64,...': {_SENDS_DATA}")
    return url


def _unreadable(text: str, where: str) -> ApiError:
    return ApiError(without_addresses(text), param=where, code="invalid_image")
