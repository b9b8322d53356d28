"""Columns with images of a data set. Runs without images do not load it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from lockstep.rollout.environments.prompt import IMAGE_COLUMNS, num_images, too_many_images
from lockstep.rollout.errors import DataError
from lockstep.rollout.media.placement import placed
from lockstep.rollout.media.store import ImageStore
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.datasets import is_file, is_made
from lockstep.trainer.data.reader import Row, Rows
from lockstep.trainer.data.row_images import RowImages


def images_of(settings: DataSetConfig, store: ImageStore | None) -> RowImages:
    """Return the reader of the images of a data set. store: None if rows are only checked."""
    return RowImages(store, folder=_folder(settings.path), sources=_sources(settings))


def undecoded(rows: Rows) -> Rows:
    """Return the rows with images as the bytes or paths of their table, instead of PIL images."""
    if isinstance(rows.items, list):
        return rows
    table = copy.deepcopy(rows.items)
    for feature in _image_features(table.info.features):  # `table.features` is a copy
        feature.decode = False
    return replace(rows, items=table)


def columns_with_images(rows: Rows, settings: DataSetConfig) -> set[str]:
    """Return the columns of a table whose bytes are read as images: those of images, and lists of messages."""
    names = {*IMAGE_COLUMNS, *_sources(settings)}
    fields = [] if isinstance(rows.items, list) else rows.items.features.arrow_schema
    return names | {field.name for field in fields if "struct<" in str(field.type) and "role: " in str(field.type)}


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


def _sources(settings: DataSetConfig) -> set[str]:
    return {column for column in image_columns(settings).values() if column is not None}


def _folder(path: str) -> Path | None:
    """Return the folder of relative paths: that of the file, or of the program; None for data of the hub."""
    place = Path(path).expanduser().absolute()
    if is_file(path):
        return place.parent
    return Path.cwd() if is_made(path) else place if place.is_dir() else None


def _image_features(feature: Any) -> Iterator[datasets.Image]:
    if isinstance(feature, datasets.Image):
        yield feature
    elif isinstance(feature, Mapping):
        for inner in feature.values():
            yield from _image_features(inner)
    elif isinstance(feature, list):
        yield from _image_features(feature[0])
    elif isinstance(feature, datasets.List | datasets.LargeList):
        yield from _image_features(feature.feature)
