"""Batches and rows as bytes: whole ones for files, parts for other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import safetensors.numpy

from lockstep.rollout.records import ImageSpan, SamplingSupport, TrainingRow
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import PREFIX, TeacherScores

ROW_ARRAYS = {
    "ids": np.int64,
    "loss_mask": np.bool_,
    "sampling_logprobs": np.float32,
    "versions": np.int32,
    "turns": np.int32,
}
_ROLLOUT_ARRAYS = [field.name for field in fields(StepBatch) if field.name not in ("rows", "teacher")]


def encode(batch: StepBatch) -> bytes:
    """Serialize a batch for `decode` as safetensors, which runs no code when it is read."""
    teacher = {} if batch.teacher is None else batch.teacher.arrays()
    return to_bytes(row_arrays(batch.rows) | rollout_arrays(batch) | teacher)


def decode(payload: bytes) -> StepBatch:
    arrays = safetensors.numpy.load(payload)
    teacher = TeacherScores.from_arrays(arrays) if any(name.startswith(PREFIX) for name in arrays) else None
    return StepBatch(rows=tuple(rows_of(arrays)), teacher=teacher, **rollout_values(arrays))


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialize arrays for `safetensors.numpy.load`, which would read others for those that are not contiguous."""
    return safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def rollout_arrays(batch: StepBatch) -> dict[str, np.ndarray]:
    """Return the arrays of a batch with values per rollout or turn."""
    return {name: getattr(batch, name) for name in _ROLLOUT_ARRAYS}


def rollout_values(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the fields of a batch for `rollout_arrays`, among other arrays."""
    return {name: arrays[name] for name in _ROLLOUT_ARRAYS}


def row_arrays(rows: Sequence[TrainingRow], names: Iterable[str] = ROW_ARRAYS) -> dict[str, np.ndarray]:
    """Return the arrays of rows, one after the other. names: of arrays with a value per token."""
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate(
            [np.zeros(0, ROW_ARRAYS[name]), *(getattr(row, name) for row in rows)], dtype=ROW_ARRAYS[name]
        )
        for name in names
    }
    arrays |= {
        "row_lengths": np.array([len(row) for row in rows], dtype=np.int64),
        "row_rollout": np.array([row.rollout_id for row in rows], dtype=np.int64),
        "row_group": np.array([row.group_id for row in rows], dtype=np.int64),
    }
    supports = [row.support for row in rows if row.support is not None]
    if supports:
        arrays["support_sizes"] = np.concatenate([np.diff(support.offsets) for support in supports])
        arrays["support_ids"] = np.concatenate([support.token_ids for support in supports])
    routes = [row.routes for row in rows if row.routes is not None]
    if routes:
        arrays["routes"] = np.concatenate(routes)
        arrays["route_counts"] = np.array(list(map(len, routes)), dtype=np.int64)
    spans = [(index, span) for index, row in enumerate(rows) for span in row.images]
    if spans:
        arrays["image_spans"] = np.array([(index, span.start, span.end) for index, span in spans], dtype=np.int64)
        digests = b"".join(bytes.fromhex(span.digest) for _, span in spans)
        arrays["image_digests"] = np.frombuffer(digests, dtype=np.uint8).reshape(len(spans), -1)
    return arrays


def rows_of(arrays: Mapping[str, np.ndarray]) -> list[TrainingRow]:
    """Invert `row_arrays` with all names, among other arrays."""
    bounds = np.concatenate([[0], np.cumsum(arrays["row_lengths"])])
    trained_bounds = np.concatenate([[0], np.cumsum(arrays["loss_mask"])])[bounds]
    sizes = arrays.get("support_sizes")
    support_bounds = None if sizes is None else np.concatenate([[0], np.cumsum(sizes)])
    routes = arrays.get("routes")
    route_bounds = np.concatenate([[0], np.cumsum(arrays.get("route_counts", []), dtype=np.int64)])
    images: dict[int, list[ImageSpan]] = defaultdict(list)
    for (index, start, end), digest in zip(
        arrays.get("image_spans", np.zeros((0, 3), np.int64)).tolist(), arrays.get("image_digests", ()), strict=True
    ):
        images[index].append(ImageSpan(start=start, end=end, digest=digest.tobytes().hex()))

    def support(i: int) -> SamplingSupport | None:
        if support_bounds is None:
            return None
        offsets = support_bounds[trained_bounds[i] : trained_bounds[i + 1] + 1]
        return SamplingSupport(offsets=offsets - offsets[0], token_ids=arrays["support_ids"][offsets[0] : offsets[-1]])

    return [
        TrainingRow(
            **{name: arrays[name][start:end] for name in ROW_ARRAYS},
            rollout_id=int(arrays["row_rollout"][i]),
            group_id=int(arrays["row_group"][i]),
            support=support(i),
            routes=None if routes is None else routes[route_bounds[i] : route_bounds[i + 1]],
            images=tuple(images[i]),
        )
        for i, (start, end) in enumerate(pairwise(bounds))
    ]
