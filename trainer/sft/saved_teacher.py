"""A teacher whose scores were saved beside the rollouts that are trained now (`teacher.source=saved`): no engine.

The scores of a row are found by its digest (trainer/batch/saved_scores.py), so they are of its tokens, in whatever
order the rows are trained. Equal rows get the scores of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout
from lockstep.trainer.batch.saved_scores import FILE_SUFFIX, SavedScores, row_digest
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import TeacherScores
from lockstep.trainer.build import vocab_size_of
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.data.datasets import rollout_files
from lockstep.trainer.data.demonstrations import Demonstration
from lockstep.trainer.distributed.distributed import Distributed


class SavedTeacher:
    """Finder of the scores of rows; in place of a `Teacher`."""

    measured: Mapping[str, float] = {}  # stays empty: nothing is computed

    def __init__(self, distributed: Distributed, files: Sequence[SavedScores], *, top_k: int) -> None:
        """files: on rank 0. top_k: most probable tokens at each position."""
        self._distributed = distributed
        self._top_k = top_k
        self._places = {digest: (file, row) for file in files for row, digest in enumerate(file.digests)}

    @classmethod
    def open(
        cls,
        data_sets: Collection[DataSetConfig],
        model: ModelConfig,
        distributed: Distributed,
        sets: Sequence[Sequence[Demonstration]] | None,
        *,
        top_k: int,
        say: Callable[[str], None],
    ) -> SavedTeacher:
        """Open the files beside the rollouts of the demonstrations.

        data_sets: of the demonstrations. sets: these, tokenized; None on ranks other than 0, which open none. top_k:
        most probable tokens at each position.

        Raises `DataError` for rows without scores, and files that cannot be read, have too few tokens, values that no
        scores have, or tokens that the student lacks.
        """
        if sets is None:
            return cls(distributed, (), top_k=top_k)
        paths = [path for one in data_sets for path in rollout_files(one.path)]
        files = [SavedScores.open(path.with_suffix(FILE_SUFFIX)) for path in paths]
        short = min(files, key=lambda file: file.top_k)
        if short.top_k < top_k:
            advice = "opd saves none" if not short.top_k else f"set algorithm.teacher_divergence_top_k={short.top_k}"
            raise DataError(
                f"{short.path} has the {short.top_k} most probable tokens, expected "
                f"algorithm.teacher_divergence_top_k={top_k}; {advice}, or score the rows again with "
                "teacher.source=model teacher.path=<model>"
            )
        vocab_size = vocab_size_of(model.path, trust_remote_code=model.trust_remote_code)
        for file in files:
            ids = file.between(0, len(file.digests), top_k=file.top_k).top_ids
            if ids.max(initial=0) >= vocab_size:
                raise DataError(
                    f"{file.path}: the teacher's scores name the token {ids.max()}, but the student has {vocab_size} "
                    "ids; take scores of a teacher with the student's tokenizer"
                )
        saved_teacher = cls(distributed, files, top_k=top_k)
        rows = [row for demonstrations in sets for rows in demonstrations for row in rows]
        missing = sum(row_digest(row.row(0)) not in saved_teacher._places for row in rows)
        if missing:
            raise DataError(
                f"{missing} of {len(rows)} rows of the demonstrations have no saved scores of a teacher, such as those "
                "of groups that dynamic sampling dropped; score them with teacher.source=model teacher.path=<model>"
            )
        scored_files = [file for file in files if file.digests]
        for name in dict.fromkeys(file.teacher for file in scored_files):
            versions = [file.version for file in scored_files if file.teacher == name]
            say(f"teacher        saved scores of {name}, weights of versions {min(versions)} to {max(versions)}")
        return saved_teacher

    def scored(self, batch: StepBatch, rollouts: Sequence[Rollout]) -> StepBatch:
        """Return the batch of rank 0 with the saved scores; a collective. Raises `DataError` on all ranks for a file
        that cannot be read, and `EvidenceError` for scores of other tokens."""
        return self._distributed.together(lambda: self._scored(batch) if self._distributed.is_main else batch)

    def _scored(self, batch: StepBatch) -> StepBatch:
        places = [self._places[row_digest(row)] for row in batch.rows]
        parts = [file.between(row, row + 1, top_k=self._top_k) for file, row in places]
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in ("logp", "top_ids", "top_logp")
        }
        version = np.concatenate([part.version for part in parts]).max(keepdims=True)
        scores = TeacherScores(**arrays, version=version)
        scores.check_tokens(batch.rows)
        return replace(batch, teacher=scores)
