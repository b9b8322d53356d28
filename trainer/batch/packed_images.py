"""Images of a pack: their pixels, the tokens that stand for them, and the positions that they give to tokens.

    row.images (spans, digests) ─► `ImageSource`: prepared images ─► checked against the ids ─► `PackedImages`

Models with rotary positions in three parts (M-RoPE: time, height, width) count an image as a grid: its tokens have the
place of their patch, and the text after it continues from the larger side. Other models count tokens.

Shape legend: _L tokens of the pack, _K tokens of images of the pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lockstep.rollout.errors import DataError, EvidenceError
from lockstep.rollout.media.prepared_image import PreparedImage
from lockstep.rollout.records import ImageSpan, TrainingRow

GRID = "image_grid_thw"
"""Patches of an image (time, height, width), as the processors of Qwen-VL name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """Prepared images, and how the model of a run counts their tokens."""

    prepared: Callable[[str], PreparedImage]
    """Returns the image of a digest, or raises `DataError`."""
    token_id: int
    """Id of every token of an image."""
    merge_size: int | None
    """Patches along a side of a token, for rotary positions in three parts; None: the model has none."""
    is_bidirectional: bool
    """Tokens of an image attend to all of it; False: only to those before them, as text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedImages:
    """Images of a pack in the order of their tokens. All tensors are on the device of the pack."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors of `PreparedImage`, concatenated over the images."""
    token_index_K: torch.Tensor
    """(K,) int64 positions in the pack that hold tokens of images, ascending."""
    position_ids_3L: torch.Tensor | None
    """(3, L) int64 rotary positions, each row as if it were alone; None: those of the pack."""
    blocks: tuple[tuple[int, int], ...]
    """First position in the pack and the end of each image whose tokens attend to all of it, on the host."""

    def to(self, device: torch.device | str) -> PackedImages:
        positions = self.position_ids_3L
        return replace(
            self,
            tensors={name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()},
            token_index_K=self.token_index_K.to(device, non_blocking=True),
            position_ids_3L=None if positions is None else positions.to(device, non_blocking=True),
        )


def packed_images(
    rows: Sequence[TrainingRow], places: Sequence[np.ndarray], *, num_tokens: int, source: ImageSource | None
) -> PackedImages:
    """Return the images of the rows of a pack, of which at least one has some.

    places: positions in the pack of each row's tokens, which rows share where they share a prefix; such an image comes
    once. num_tokens: L. source: None for a model that sees no images.

    Raises `EvidenceError` with the digest if an image is missing or does not fit the ids of its span, or if one of its
    tokens is trained.
    """
    by_start: dict[int, tuple[np.ndarray, PreparedImage]] = {}
    has_grids = source is not None and source.merge_size is not None
    positions_3L = np.zeros((3, num_tokens), dtype=np.int64)
    for row, place in zip(rows, places, strict=True):
        images = _images_of(row, source)
        for span, image in zip(row.images, images, strict=True):
            span_place = place[span.start : span.end]
            by_start[int(span_place[0])] = span_place, image
        if has_grids:
            assert source is not None
            grids = [_grid(image, source) for image in images]
            positions_3L[:, place] = rotary_positions(len(row), row.images, grids)
    in_order = [by_start[start] for start in sorted(by_start)]
    names = in_order[0][1].tensors
    return PackedImages(
        tensors={name: torch.cat([image.tensors[name] for _, image in in_order]) for name in names},
        token_index_K=torch.from_numpy(np.concatenate([span_place for span_place, _ in in_order])),
        position_ids_3L=torch.from_numpy(positions_3L) if has_grids else None,
        blocks=tuple((int(span_place[0]), int(span_place[-1]) + 1) for span_place, _ in in_order)
        if source is not None and source.is_bidirectional
        else (),
    )


def rotary_positions(length: int, spans: Sequence[ImageSpan], grids: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the (3, length) positions of a row's tokens in time, height and width.

    grids: (time, height, width) of each span, in tokens. They are those of `get_rope_index` in transformers.
    """
    parts, start, end = [], 0, 0
    for span, grid in zip(spans, grids, strict=True):
        text = span.start - end
        parts.append(np.tile(np.arange(start, start + text), (3, 1)))
        parts.append(start + text + np.indices(grid).reshape(3, -1))
        start, end = start + text + max(grid[1:]), span.end
    parts.append(np.tile(np.arange(start, start + length - end), (3, 1)))
    return np.concatenate(parts, 1)


def _images_of(row: TrainingRow, source: ImageSource | None) -> list[PreparedImage]:
    """Return the images of a row, each checked against the ids of its span."""
    images, end = [], 0
    for span in row.images:
        place = f"row of rollout {row.rollout_id}: image {span.digest} of tokens [{span.start}, {span.end})"
        if source is None:
            raise EvidenceError(f"{place}, but the model was loaded without its vision tower")
        if not end <= span.start < span.end <= len(row):
            raise EvidenceError(f"{place} overlaps another, or is not within the {len(row)} tokens of the row")
        try:
            image = source.prepared(span.digest)
        except DataError as error:
            raise EvidenceError(f"{place} is missing: {error}") from error
        if span.end - span.start != image.num_tokens:
            raise EvidenceError(f"{place} has {image.num_tokens} tokens")
        if (row.ids[span.start : span.end] != source.token_id).any():
            raise EvidenceError(f"{place}: its ids are not all those of image tokens ({source.token_id})")
        if row.loss_mask[span.start : span.end].any():
            raise EvidenceError(f"{place}: one of its tokens is marked as trained, but no model samples them")
        images.append(image)
        end = span.end
    return images


def _grid(image: PreparedImage, source: ImageSource) -> tuple[int, int, int]:
    """Return the tokens of an image in time, height and width."""
    assert source.merge_size is not None
    time, height, width = image.tensors[GRID][0].tolist()
    grid = time, height // source.merge_size, width // source.merge_size
    if np.prod(grid) != image.num_tokens:
        raise EvidenceError(f"image {image.digest}: a grid of {grid} tokens, expected {image.num_tokens} in all")
    return grid
