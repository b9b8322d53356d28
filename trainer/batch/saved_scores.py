"""The file of a teacher's scores beside the rollouts of a step: which tokens were scored, and by which teacher.

Each scored row is named by a digest of its tokens. So scores of other tokens are refused, and those of a row are found.

Dimensions: _R rows with trained tokens, _N their trained tokens, _E most probable tokens of the teacher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from lockstep.rollout.errors import DataError, EvidenceError
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.teacher_scores import PREFIX, TeacherRow, TeacherScores

FILE_SUFFIX = ".teacher.safetensors"
"""End of the name of the file, which begins as that of the rollouts."""
TEACHER, DIGESTS, COUNTS = "teacher", "row_digests", "row_tokens"
"""Names of what the file has beside the scores: settings of the teacher, as metadata; digests of the rows, (R, 16)
uint8; their numbers of trained tokens, (R,) int64."""
DIGEST_BYTES = 16


def row_digest(row: TrainingRow) -> bytes:
    """Return a digest of what a teacher scores of a row: ids, loss mask and images up to the last trained token."""
    scored = TeacherRow.plain(row)
    content = scored.ids.astype(np.int64).tobytes() + row.loss_mask[: len(scored.ids)].astype(np.uint8).tobytes()
    content += "".join(image.digest for image in scored.images).encode()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def write_scores(path: Path, rows: Sequence[TrainingRow], scores: TeacherScores, *, teacher: str) -> None:
    """Write the scores of a step. rows: all of the step. teacher: settings that name it. Raises OSError."""
    trained_rows = [row for row in rows if row.num_trained]
    digests = np.frombuffer(b"".join(map(row_digest, trained_rows)), np.uint8).reshape(-1, DIGEST_BYTES)
    counts = np.array([row.num_trained for row in trained_rows], np.int64)
    arrays = {**scores.arrays(), DIGESTS: digests, COUNTS: counts}
    path.write_bytes(safetensors.numpy.save(arrays, metadata={TEACHER: teacher}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedScores:
    """A file of scores, which are read on demand."""

    path: Path
    teacher: str
    """Settings that name the teacher."""
    version: int
    """Version of its weights; -1 if no token was scored."""
    top_k: int
    digests: Sequence[bytes]
    """R of them."""
    starts: np.ndarray
    """(R + 1,) int64: row r has the scores from starts[r] to starts[r + 1]."""

    @classmethod
    def open(cls, path: Path) -> SavedScores:
        """Read all but the scores. Raises `DataError` for a file that is missing, damaged, or of an earlier version."""
        try:
            if not path.is_file():
                raise FileNotFoundError("the file is missing, or no regular file")
            with safe_open(path, framework="numpy") as file:
                digests_and_counts = [file.get_tensor(name) for name in (DIGESTS, COUNTS) if name in set(file.keys())]
                num_tokens, top_k = file.get_slice(f"{PREFIX}top_ids").get_shape()
                (version,) = file.get_tensor(f"{PREFIX}version").tolist()
                teacher = (file.metadata() or {}).get(TEACHER, "")
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise DataError(
                f"{path} has no scores of a teacher: {error}; expected one that a run with a teacher and "
                "logger.save_rollouts=true wrote"
            ) from error
        if len(digests_and_counts) < 2:
            raise DataError(
                f"{path} does not say which tokens were scored, like all files of earlier versions; expected an array "
                f"{DIGESTS}; train the step again, or take one of a newer run"
            )
        digests, counts = digests_and_counts
        starts = np.concatenate([[0], np.cumsum(counts)])
        is_sound = (counts.dtype, counts.ndim, digests.dtype) == (np.int64, 1, np.uint8) and counts.min(initial=0) >= 0
        if not is_sound or digests.shape != (len(counts), DIGEST_BYTES) or starts[-1] != num_tokens:
            raise DataError(f"{path} is damaged: {num_tokens} tokens are scored, expected the {starts[-1]} of its rows")
        names = [digest.tobytes() for digest in digests]
        return cls(path=path, teacher=teacher, version=version, top_k=top_k, digests=names, starts=starts)

    def of(self, rows: Sequence[TrainingRow]) -> TeacherScores:
        """Return the scores of a step. Raises `DataError` unless they are of these rows, in this order."""
        trained_rows = [row for row in rows if row.num_trained]
        pairs = zip_longest(self.digests, map(row_digest, trained_rows))
        other = next((index for index, (digest, expected) in enumerate(pairs) if digest != expected), None)
        if other is not None:
            of_rollout = f" (of rollout {trained_rows[other].rollout_id})" if other < len(trained_rows) else ""
            raise DataError(
                f"{self.path} has scores of other tokens than the rollouts: it has {len(self.digests)} rows, expected "
                f"{len(trained_rows)}; the first that differs is row {other}{of_rollout}; take the file that the run "
                "wrote with these rollouts, and settings that keep the same of them"
            )
        scores = self.between(0, len(self.digests), top_k=self.top_k)
        try:
            scores.check_tokens(trained_rows)
        except EvidenceError as error:
            raise DataError(f"{self.path} is damaged: {error}") from error
        return scores

    def between(self, first: int, last: int, *, top_k: int) -> TeacherScores:
        """Return the scores of the rows from `first` to `last` - 1, with the `top_k` most probable tokens.

        Raises `DataError` for a file that cannot be read, or has values that no scores have.
        """
        tokens = slice(*self.starts[[first, last]].tolist())
        cuts = {"logp": (tokens,), "top_ids": (tokens, slice(top_k)), "top_logp": (tokens, slice(top_k))}
        try:
            with safe_open(self.path, framework="numpy") as file:
                arrays = {}
                for field in fields(TeacherScores):
                    name, cut = f"{PREFIX}{field.name}", cuts.get(field.name, (slice(None),))
                    lazy = file.get_slice(name)  # which cannot cut empty arrays
                    arrays[field.name] = file.get_tensor(name)[cut] if 0 in lazy.get_shape() else lazy[cut]
            return TeacherScores(**arrays)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.path} cannot be read: {error}") from error
        except EvidenceError as error:
            raise DataError(f"{self.path} is damaged: {error}") from error
