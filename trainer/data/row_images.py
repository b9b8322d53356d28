"""Images of data rows, as parts of messages with digests. A row that is read holds no other image, so it is JSON.

images, image    a path, bytes, a data URL, the {"bytes", "path"} of `datasets`, a PIL image, or a list of them, each
                 also inside of an object: {"image": ...}, {"url": ...}
messages         parts {"type": "image", "image": ...} and {"type": "image_url", "image_url": {"url": ...}}
"""

from __future__ import annotations

import base64
import copy
import io
import json
import os.path
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from PIL import Image

from lockstep.rollout.environments.prompt import (
    IMAGE_COLUMNS,
    image_values,
    is_image,
    num_images,
    too_many_images,
)
from lockstep.rollout.errors import ConfigError, DataError, TemplateError
from lockstep.rollout.media.image_files import check_image, read_image
from lockstep.rollout.media.placement import placed
from lockstep.rollout.media.store import UNREADABLE, ImageStore
from lockstep.rollout.records import Message, image_parts, is_image_part
from lockstep.rollout.safe_text import error_text
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.datasets import is_file, is_made
from lockstep.trainer.data.reader import Row, Rows

if TYPE_CHECKING:
    import datasets

VALUES = ("bytes", "image", "image_url", "url", "path")
"""Keys of objects that hold an image, or an object that does."""
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys with which Qwen's utilities would resize an image."""
Digest = Callable[[Mapping[str, Any], str], str]
"""Function of a part with a value, and of its place in the row."""


class RowImages:
    """Reader of the images of the rows of a data set."""

    def __init__(
        self, store: ImageStore | None, *, folder: Path | None, columns: Mapping[str, str | None] | None = None
    ) -> None:
        """
        Args:
            store: of the run; None: rows are only checked.
            folder: of relative paths; None: they are refused.
            columns: the part of `data.columns` that is about images.
        """
        self._store, self._folder, self.columns = store, folder, columns or {}
        self.sources = {column for column in self.columns.values() if column is not None}
        """Columns that a row has as `images` or `image`, too."""

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with parts in place of images, in column `images` as a list, and put them into the store.

        Raises `DataError` for an image that cannot be read, and `ConfigError` if it cannot be stored.
        """
        return self._converted(row, self._stored)

    def checked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as `read` does, from the headers of its images. Their digests are hashes of the encoded
        images, or of the paths, in this process. Raises `DataError`."""
        return self._converted(row, _check_and_hash)

    def _converted(self, row: Mapping[str, Any], digest: Digest) -> dict[str, Any]:
        names = [name for name in IMAGE_COLUMNS if image_values(row.get(name))]
        if len(names) > 1 and row[names[0]] is not row[names[1]]:
            raise DataError(
                f"columns {' and '.join(names)} both hold images; leave one out: set 'data.columns={{image: null}}'"
            )
        values = image_values(row[names[0]]) if names else []
        parts = [self._part(value, f"column {names[0]}, image {i}", digest) for i, value in enumerate(values)]
        converted: dict[str, Any] = {}
        for name, value in row.items():
            if image_values(value) and (name in names or name in self.sources):
                converted[name] = parts if name == "images" or isinstance(value, list | tuple) else parts[0]
            else:
                converted[name] = self._without_bytes(value, name, parts, digest)
        return {**converted, "images": parts}

    def _without_bytes(self, value: Any, path: str, parts: list[dict[str, Any]], digest: Digest) -> Any:
        """Return the value at a path of a row, with parts in place of the images of messages, and of those that
        `data.columns` names. Raises `DataError` for other images and bytes."""
        if not isinstance(value, Mapping | list | tuple | bytes):
            return value
        if path in self.sources and image_values(value):
            return parts if isinstance(value, list | tuple) else parts[0]
        if _are_messages(value):
            _check_indices(value, path)
            return [self._message(turn, f"column {path}, message {i}", digest) for i, turn in enumerate(value)]
        if isinstance(value, bytes) or any(map(_is_filled_image, image_values(value))):
            name, inside = "bytes" if isinstance(value, bytes) else "an image that no prompt shows", "[" in path
            show = "" if inside else f"set 'data.columns={{images: {path}}}', or "
            raise DataError(
                f"column {path} holds {name}; {show}leave it out: "
                f"'data.columns={{{path.partition('.')[0].partition('[')[0]}: null}}'"
            )
        if isinstance(value, Mapping):
            return {key: self._without_bytes(item, f"{path}.{key}", parts, digest) for key, item in value.items()}
        return [self._without_bytes(item, f"{path}[{i}]", parts, digest) for i, item in enumerate(value)]

    def _message(self, message: Mapping[str, Any], place: str, digest: Digest) -> Mapping[str, Any]:
        if beside := next((name for name in IMAGE_COLUMNS if image_values(message.get(name))), None):
            raise DataError(
                f"{place}: found images in its key {beside}; expected them in its content, as parts "
                '{"type": "image", "image": ...}, or in column images'
            )
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return message
        parts = [
            self._part_of_message(part, f"{place}, part {number}", digest) if isinstance(part, Mapping) else part
            for number, part in enumerate(content)
        ]
        return {**message, "content": parts}

    def _part_of_message(self, part: Mapping[str, Any], place: str, digest: Digest) -> Mapping[str, Any]:
        if not is_image_part(part):
            if _value_of({key: part.get(key) for key in ("image", "image_url")}, place) is not None:
                raise DataError(f'{place}: found an image and "type": {json.dumps(part.get("type"))}, expected "image"')
            return part
        if part["type"] == "image" and part.get("digest") is None and _value_of(part, place) is None:
            return {"type": "image"}  # a place for an image of the row
        return self._part(part, place, digest)

    def _part(self, value: Any, place: str, digest: Digest) -> dict[str, Any]:
        if isinstance(value, Mapping) and "type" in value and value.get("digest") is not None:
            raise DataError(f"{place}: found an image of another run, by its digest; expected a path or bytes")
        value = _value_of(value, place)
        try:
            return {"type": "image", "digest": digest({"type": "image", "image": self._located(value, place)}, place)}
        except TemplateError as error:
            raise DataError(str(error)) from error

    def _located(self, value: Any, place: str) -> Any:
        """Return a path in the folder for a relative one, and other values as they are. Raises `DataError`."""
        if not isinstance(value, str) or value.startswith("data:"):
            return value
        path = Path(os.path.expanduser(value.removeprefix("file://")))
        if path.is_absolute() or "://" in value:
            return value if "://" in value.removeprefix("file://") else str(path)
        if self._folder is None:
            raise DataError(
                f"{place}: the path {value!r:.200} is relative, and the data set lies in no local folder; set "
                "data.path=<a local file beside its images>"
            )
        return str(self._folder / path)

    def _stored(self, part: Mapping[str, Any], place: str) -> str:
        assert self._store is not None, "rows are only checked"
        try:
            image = read_image(part, place)
        except TemplateError as error:  # its header could be read; the rollouts of this row fail, not the run
            return f"{UNREADABLE}{error}"
        try:
            return self._store.add(image)
        except OSError as error:
            raise ConfigError(f"{place}: the image cannot be stored: {error_text(error)}") from error


def image_of_json(value: bytes | Image.Image) -> dict[str, str | None]:
    """Return an image as `datasets` would give it, with a data URL for its path. Raises ValueError."""
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        try:
            read_image({"type": "image", "image": value}, "PIL image").save(file, format="PNG")
        except TemplateError as error:
            raise ValueError(str(error)) from error
        value = file.getvalue()
    return {"bytes": None, "path": f"data:;base64,{base64.b64encode(value).decode()}"}


def _check_and_hash(part: Mapping[str, Any], place: str) -> str:
    """Return a hash of the encoded image or of its path, in this process."""
    check_image(part, place)
    value = part["image"]
    return f"{hash(value.tobytes() if isinstance(value, Image.Image) else value) % 2**64:064x}"


def _are_messages(value: Any) -> TypeGuard[Sequence[Message]]:
    return isinstance(value, list | tuple) and all(isinstance(turn, Mapping) and "role" in turn for turn in value)


def _is_filled_image(value: Any) -> bool:
    return is_image(value) and any(item is not None for item in value.values())


def _check_indices(messages: Sequence[Message], path: str) -> None:
    """Raise `DataError` unless the places that say which image of the row they show have its order."""
    indices = [part["index"] for turn in messages for part in image_parts(turn) if part.get("index") is not None]
    if indices != list(range(len(indices))):
        raise DataError(
            f"column {path}: its images have the indices {indices}, expected {list(range(len(indices)))}: places are "
            "filled in order; sort column images, and leave index out"
        )


def _value_of(value: Any, place: str) -> Any:
    """Return the image that objects hold, by the keys of `datasets`, Qwen, OpenAI and transformers; None without one.

    Raises `DataError` for an object with other keys only, and for one that asks for a size.
    """
    while isinstance(value, Mapping):
        filled = {key: item for key, item in value.items() if key not in ("type", "index") and item}
        if sizes := [key for key in SIZES if key in filled]:
            raise DataError(
                f"{place}: found {', '.join(sizes)} of an image; expected none: the preprocessor_config.json of the "
                "model says how large images become; write it there, or leave it out"
            )
        value = next((filled[key] for key in VALUES if key in filled), None)
        if value is None and filled:
            raise DataError(
                f"{place}: found an image with the keys {', '.join(filled)}; expected a path, bytes or a data URL in "
                f"one of {', '.join(VALUES)}"
            )
    return value


def images_of(settings: DataSetConfig, store: ImageStore | None) -> RowImages:
    """Return the reader of the images of a data set. store: None if rows are only checked."""
    return RowImages(store, folder=_folder(settings.path), columns=image_columns(settings))


def undecoded(rows: Rows) -> Rows:
    """Return the rows with images as the bytes or paths of their table, instead of PIL images."""
    if isinstance(rows.items, list):
        return rows
    table = copy.deepcopy(rows.items)
    for feature in _image_features(table.info.features):  # `table.features` is a copy
        feature.decode = False
    return replace(rows, items=table)


def columns_with_images(rows: Rows, settings: DataSetConfig) -> set[str]:
    """Return the columns of a table that may hold bytes, since each row is searched for others than images."""
    sources = filter(None, image_columns(settings).values())
    names = {*IMAGE_COLUMNS, *(name for path in sources for name in (path, path.partition(".")[0]))}
    fields = [] if isinstance(rows.items, list) else rows.items.features.arrow_schema
    return names | {field.name for field in fields if "struct<" in str(field.type)}


def conversation(row: Row, *, images: RowImages, most: int | None) -> list[Any]:
    """Return column `messages` of a demonstration with the images of the row at their places.

    most: images of a conversation; None: any number. Raises `DataError`.
    """
    row = images.read(row)
    messages = placed(row["messages"], row["images"])
    if most is not None and (count := num_images(messages)) > most:
        raise DataError(too_many_images(count, most))
    return list(messages)


def image_columns(settings: DataSetConfig) -> dict[str, str | None]:
    """Return the part of `data.columns` that is about images."""
    return {name: column for name, column in (settings.columns or {}).items() if name in IMAGE_COLUMNS}


def _folder(path: str) -> Path | None:
    """Return the folder of relative paths: that of the file, or of the program; None for data of the hub."""
    place = Path(os.path.expanduser(path)).absolute()
    if is_file(path):
        return place.parent
    return Path.cwd() if is_made(path) else place if place.is_dir() else None


def _image_features(feature: Any) -> Iterator[datasets.Image]:
    import datasets  # the first row of a file is checked without it

    if isinstance(feature, datasets.Image):
        yield feature
    elif isinstance(feature, Mapping):
        for inner in feature.values():
            yield from _image_features(inner)
    elif isinstance(feature, list):
        yield from _image_features(feature[0])
    elif isinstance(feature, datasets.List | datasets.LargeList):
        yield from _image_features(feature.feature)
