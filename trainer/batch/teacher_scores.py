"""A teacher's scores of the trained tokens of a step.

Dimensions: _N trained tokens of the step, _E most probable tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from lockstep.rollout.engine.token_scores import TokenScores, check_tokens, check_values
from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import ImageSpan, PromptIds, TrainingRow

PREFIX = "teacher_"
"""Beginning of the names of its arrays in a serialized batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherRow:
    """Ids that a teacher computes for a training row, up to the row's last trained token."""

    ids: np.ndarray
    """(L,) int64."""
    start: int = 0
    """Position in the row from which the teacher's ids are those of the row; before it, it may see others."""
    shift: int = 0
    """The teacher's position of these ids less that in the row."""
    images: tuple[ImageSpan, ...] = ()

    @classmethod
    def plain(cls, row: TrainingRow) -> TeacherRow:
        """Return the row's own ids and images."""
        return cls.after(PromptIds(), row, start=0)

    @classmethod
    def after(cls, prompt: PromptIds, row: TrainingRow, *, start: int) -> TeacherRow:
        """Return the row's ids and images from `start` on, after another prompt."""
        end, shift = int(np.flatnonzero(row.loss_mask)[-1]) + 1, len(prompt) - start
        ids = np.concatenate([np.asarray(prompt, dtype=np.int64), row.ids[start:end]])
        images = (image.shifted(shift) for image in row.images if start <= image.start < end)
        return cls(ids=ids, start=start, shift=shift, images=(*prompt.images, *images))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherScores:
    """Logprobs at temperature 1. Raises `EvidenceError` for arrays of other lengths, and values as `TokenScores`."""

    logp: np.ndarray
    """(N,) float32 of the trained tokens."""
    top_ids: np.ndarray
    """(N, E) int32 the teacher's most probable tokens at the same positions."""
    top_logp: np.ndarray
    """(N, E) float32."""
    version: np.ndarray
    """(1,) int64 version of the teacher's weights; -1 if no token was scored."""

    def __post_init__(self) -> None:
        num = len(self.logp)
        if self.logp.ndim != 1 or self.top_ids.shape != self.top_logp.shape or self.top_ids.shape[:1] != (num,):
            raise EvidenceError(
                f"teacher: logprobs of {self.logp.shape} tokens, most probable tokens of shapes {self.top_ids.shape} "
                f"and {self.top_logp.shape}; expected one row per trained token"
            )
        if self.version.shape != (1,) or self.version.dtype != np.int64:
            raise EvidenceError(
                f"teacher: versions of the type {self.version.dtype} and shape {self.version.shape}; expected one int64"
            )
        check_values(self.logp, self.top_ids, self.top_logp)

    @classmethod
    def of(
        cls,
        rows: Sequence[TrainingRow],
        scores: Sequence[TokenScores],
        *,
        top_k: int,
        computed: Sequence[TeacherRow] | None = None,
    ) -> TeacherScores:
        """Take the trained tokens of the rows from the scores of their beginnings.

        scores: of each row with trained tokens, in order, up to its last trained token. computed: what the teacher
        computed for them; None: the rows themselves. Raises `EvidenceError` for scores of other tokens, of several
        versions, or with another number of most probable tokens.
        """
        trained_rows = [row for row in rows if row.num_trained]
        versions = {one.version for one in scores}
        if len(versions) > 1 or any(one.top_k != top_k for one in scores):
            raise EvidenceError(f"teacher: scores of the versions {sorted(versions)}, expected one, with top_k={top_k}")
        logp, top_ids, top_logp = (
            [np.zeros(0, np.float32)],
            [np.zeros((0, top_k), np.int32)],
            [np.zeros((0, top_k), np.float32)],
        )
        for row, one, inputs in zip(trained_rows, scores, computed or map(TeacherRow.plain, trained_rows), strict=True):
            targets = np.flatnonzero(row.loss_mask)
            row_ids, scored_ids = row.ids[inputs.start : targets[-1] + 1], one.ids[inputs.start + inputs.shift :]
            if targets[0] < inputs.start or len(row_ids) != len(scored_ids) or (row_ids != scored_ids).any():
                raise EvidenceError(
                    f"teacher: scores of other tokens than those of the row of rollout {row.rollout_id}"
                )
            places = targets + inputs.shift - 1
            logp.append(one.logprobs[places])
            top_ids.append(one.top_ids[places])
            top_logp.append(one.top_logprobs[places])
        return cls(
            logp=np.concatenate(logp),
            top_ids=np.concatenate(top_ids),
            top_logp=np.concatenate(top_logp),
            version=np.array([next(iter(versions), -1)], dtype=np.int64),
        )

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> TeacherScores:
        """Invert `arrays`, among others."""
        return cls(**{field.name: arrays[f"{PREFIX}{field.name}"] for field in fields(cls)})

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays under names that no other array of a batch has."""
        return {f"{PREFIX}{field.name}": np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}

    def check_tokens(self, rows: Sequence[TrainingRow]) -> None:
        """Raise `EvidenceError` if these cannot be scores of the trained tokens of the rows."""
        tokens = [np.zeros(0, np.int64), *(row.ids[row.loss_mask] for row in rows)]
        check_tokens(np.concatenate(tokens), self.logp, self.top_ids, self.top_logp)

    @property
    def logp_N(self) -> torch.Tensor:
        return torch.from_numpy(self.logp)

    def top_at(self, index_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (T, E) int64 ids of the most probable tokens and their logprobs, at these trained tokens."""
        return torch.from_numpy(self.top_ids)[index_T].long(), torch.from_numpy(self.top_logp)[index_T]

    @property
    def top_ids_NE(self) -> torch.Tensor:
        return torch.from_numpy(self.top_ids).long()

    @property
    def top_logp_NE(self) -> torch.Tensor:
        return torch.from_numpy(self.top_logp)

    @property
    def top_mass_N(self) -> torch.Tensor:
        """(N,) float64 probability of the most probable tokens together; 0 if there are none."""
        return self.top_logp_NE.double().exp().sum(1)
