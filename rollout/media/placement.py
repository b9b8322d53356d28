"""Places of the images of a data row in its messages.

    {"type": "image"} without a value    one image each, in order
    <image> in texts                     one image each, in order; the text around it is kept
    neither                              all images before the text of the first user turn

The images are parts with digests (`trainer/data/row_images.py`), and so are those of parts with values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Message

MARKER = "<image>"
"""Text that stands for an image. In a row without images it stays text."""
MARKED_ROLES = ("system", "developer", "user", "tool")
"""Roles of turns in which it does; what the model says is left alone."""

Part = Mapping[str, Any]


def is_place(part: Any) -> bool:
    """True for a part that stands for an image of the row."""
    return isinstance(part, Mapping) and part.get("type") == "image" and part.get("digest") is None


def placed(messages: Sequence[Message], images: Sequence[Part]) -> tuple[Message, ...]:
    """Return the messages with the images at their places. Placed images stay where they are.

    Raises `DataError` unless there are as many places as images.
    """
    parts = [part for message in messages for part in _parts(message)]
    remaining = iter(part["digest"] for part in parts if isinstance(part, Mapping) and part.get("digest") is not None)
    num_places = sum(map(is_place, parts))
    if not num_places and all(image["digest"] in remaining for image in images):
        return tuple(messages)  # a row without images, or read for the second time
    if num_places:
        _require(num_places, len(images), 'parts {"type": "image"} without a value')
        following = iter(images)
        return tuple(_filled(message, following) if _parts(message) else message for message in messages)
    if num_shown := sum(part.get("type") == "image" for part in parts if isinstance(part, Mapping)):
        raise DataError(
            f"images in the messages: {num_shown}, in column images: {len(images)}, for which there is no place; "
            'leave the values out of the parts ({"type": "image"}), or leave the column out: set '
            "'data.columns={images: null}'"
        )
    if num_markers := sum(text.count(MARKER) for message in messages for text in _read_texts(message)):
        _require(num_markers, len(images), f"{MARKER} in its text")
        following = iter(images)
        return tuple(_split(message, following) if any(_read_texts(message)) else message for message in messages)
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise DataError("the prompt has no user turn that could show the images of column images")
    turn = {**messages[first], "content": [*images, *_as_parts(messages[first])]}
    return (*messages[:first], turn, *messages[first + 1 :])


def _require(num_places: int, num_images: int, places: str) -> None:
    if num_places != num_images:
        raise DataError(
            f"places for images in the prompt: {num_places} ({places}), images in column images: {num_images}; "
            "expected one place for each image: change one of them, or take all places out, for images before the text "
            "of the first user turn"
        )


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _as_parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) and content else _parts(message)


def _read_texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message in which places may be marked."""
    if message["role"] in MARKED_ROLES:
        yield from (part["text"] for part in _as_parts(message) if _is_text(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _filled(message: Message, images: Iterator[Part]) -> Message:
    return {**message, "content": [next(images) if is_place(part) else part for part in _parts(message)]}


def _split(message: Message, images: Iterator[Part]) -> Message:
    parts: list[Any] = []
    for part in _as_parts(message):
        if not _is_text(part):
            parts.append(part)
            continue
        first, *others = part["text"].split(MARKER)
        texts = [first, *(text for other in others for text in (None, other))]
        parts += [next(images) if text is None else {**part, "text": text} for text in texts if text != ""]
    return {**message, "content": parts}
