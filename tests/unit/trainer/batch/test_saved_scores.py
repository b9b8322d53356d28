"""The file of a teacher's scores: it names its teacher and its tokens, and scores of other tokens are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import ImageSpan, TrainingRow
from lockstep.trainer.batch.saved_scores import COUNTS, DIGESTS, SavedScores, write_scores
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.batch.teacher_scores import TeacherScores
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from tests.fixtures.teachers import made_up_scores
from tests.unit.trainer.batch.test_step_batch import rollout

NAMED = "teacher.source=model teacher.path=models/teacher"


def batch() -> StepBatch:
    """Make rows with 2 to 4 trained tokens, the second without any."""
    made = StepBatch.of([rollout(i, sampled=2 + i) for i in range(3)], mask_truncated=False)
    idle = replace(made.rows[1], loss_mask=np.zeros(len(made.rows[1]), bool))
    return replace(made, rows=(made.rows[0], idle, made.rows[2]))


def write(path: Path, made: StepBatch, top_k: int = 3) -> TeacherScores:
    scores = made_up_scores(made, top_k=top_k, vocab_size=40)
    write_scores(path, made.rows, scores, teacher=NAMED)
    return scores


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step-000001.teacher.safetensors"
    write(path, batch())
    return path


@pytest.mark.parametrize("top_k", [3, 0])
@pytest.mark.parametrize("made", [batch(), StepBatch.of([], mask_truncated=False)], ids=["rows", "no rows"])
def test_scores_are_read_as_they_were_written_with_the_name_of_their_teacher(
    made: StepBatch, top_k: int, tmp_path: Path
) -> None:
    written = write(tmp_path / "file", made, top_k)
    saved = SavedScores.open(tmp_path / "file")
    assert (saved.teacher, saved.version, saved.top_k) == (NAMED, 0, top_k)
    read = saved.of(made.rows)
    for field in fields(TeacherScores):
        np.testing.assert_array_equal(getattr(read, field.name), getattr(written, field.name))


def test_scores_of_a_row_with_other_images_are_refused(file: Path) -> None:
    made = batch()
    digests = ("0" * 64, "1" * 64)
    one, other = (
        replace(made, rows=(replace(made.rows[0], images=(ImageSpan(start=0, end=1, digest=digest),)), *made.rows[1:]))
        for digest in digests
    )
    write(file, one)
    SavedScores.open(file).of(one.rows)
    for rows in (other.rows, made.rows):
        with pytest.raises(DataError, match="the first that differs is row 0"):
            SavedScores.open(file).of(rows)


def test_a_teacher_is_named_by_the_settings_that_decide_its_scores() -> None:
    assert TeacherConfig(path="models/teacher", urls=["http://a:1"]).identity == NAMED
    averaged = TeacherConfig(source="average", average_decay=0.5, context="See {answer}").identity
    assert averaged == "teacher.source=average teacher.average_decay=0.5 teacher.context=See {answer}"


def test_the_scores_of_a_row_are_found_with_as_many_probable_tokens_as_are_asked_for(file: Path) -> None:
    scores = made_up_scores(batch(), top_k=3, vocab_size=40)
    found = SavedScores.open(file).between(1, 2, top_k=2)
    np.testing.assert_array_equal(found.logp, scores.logp[2:])
    np.testing.assert_array_equal(found.top_ids, scores.top_ids[2:, :2])
    np.testing.assert_array_equal(found.top_logp, scores.top_logp[2:, :2])


def other_id(row: TrainingRow) -> TrainingRow:
    ids = row.ids.copy()
    ids[0] += 1  # of the prompt: no trained token changes
    return replace(row, ids=ids)


def other_mask(row: TrainingRow) -> TrainingRow:
    first, second = np.flatnonzero(row.loss_mask)[0] - 1, np.flatnonzero(row.loss_mask)[0]
    mask = row.loss_mask.copy()
    mask[first], mask[second] = True, False  # as many trained tokens
    return replace(row, loss_mask=mask)


@pytest.mark.parametrize("changed", [other_id, other_mask])
def test_scores_of_other_tokens_are_refused(changed: Callable[[TrainingRow], TrainingRow], file: Path) -> None:
    first, idle, last = batch().rows
    saved = SavedScores.open(file)
    with pytest.raises(DataError, match=r"it has 2 rows, expected 2; the first that differs is row 1 \(of rollout 2\)"):
        saved.of([first, idle, changed(last)])
    with pytest.raises(DataError, match="the first that differs is row 0"):
        saved.of([last, idle, first])
    with pytest.raises(DataError, match="it has 2 rows, expected 1; the first that differs is row 1;"):
        saved.of([first, idle])


def test_what_follows_the_last_trained_token_was_not_scored(file: Path) -> None:
    first, idle, last = batch().rows
    longer = replace(
        last,
        **{
            name: np.append(getattr(last, name), value).astype(getattr(last, name).dtype)
            for name, value in (("ids", 3), ("loss_mask", 0), ("sampling_logprobs", 0), ("versions", -1), ("turns", -1))
        },
    )
    saved = SavedScores.open(file)
    np.testing.assert_array_equal(saved.of([first, idle, longer]).logp, saved.of([first, idle, last]).logp)


def test_missing_damaged_and_older_files_are_refused(file: Path) -> None:
    arrays = safetensors.numpy.load_file(file)
    file.with_name("damaged").write_bytes(b"not safetensors")
    for name in ("damaged", "missing"):
        with pytest.raises(DataError, match="has no scores of a teacher"):
            SavedScores.open(file.with_name(name))
    safetensors.numpy.save_file({**arrays, "teacher_top_ids": arrays["teacher_top_ids"][1:]}, file.with_name("cut"))
    with pytest.raises(DataError, match="is damaged: 5 tokens are scored, expected the 6 of its rows"):
        SavedScores.open(file.with_name("cut"))
    for counts in (np.array([-1, 7]), np.array([2.0, 4.0]), np.array([2, 2, 2]), np.array([[2, 4]])):
        safetensors.numpy.save_file({**arrays, COUNTS: counts}, file.with_name("counts"))
        with pytest.raises(DataError, match="is damaged"):
            SavedScores.open(file.with_name("counts"))
    safetensors.numpy.save_file({n: a for n, a in arrays.items() if n != DIGESTS}, file.with_name("old"))
    with pytest.raises(DataError, match="does not say which tokens were scored, like all files of earlier versions"):
        SavedScores.open(file.with_name("old"))


def with_value(name: str, place: int, value: float) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name].flat[place] = value

    return change


def with_type(name: str, kind: type) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = arrays[name].astype(kind)

    return change


def listed_twice(arrays: dict[str, np.ndarray]) -> None:
    arrays["teacher_top_ids"][0] = 7


DAMAGE = [
    (with_value("teacher_logp", 2, 3.0), "position 3 has logprob 3.0"),
    (with_value("teacher_logp", 2, np.nan), "position 3 has logprob nan"),
    (with_value("teacher_logp", 2, -np.inf), "position 3 has logprob -inf"),
    (with_value("teacher_logp", 2, -0.0), "which does not agree with the most probable tokens"),
    (with_value("teacher_top_logp", 3, 0.0), "add up to more than 1"),
    (with_value("teacher_top_logp", 3, 0.5), "position 2 has logprob"),
    (with_value("teacher_top_ids", 3, -1), "has a negative id"),
    (listed_twice, "occurs twice at a position"),
    (with_type("teacher_logp", np.float64), "types float64, int32, float32; expected float32, int32, float32"),
    (with_type("teacher_top_ids", np.float32), "types float32, float32, float32"),
    (with_type("teacher_version", np.float32), "expected one int64"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_saved_scores_are_checked_as_fresh_ones(
    change: Callable[[dict[str, np.ndarray]], None], message: str, file: Path
) -> None:
    arrays = safetensors.numpy.load_file(file)
    change(arrays)
    safetensors.numpy.save_file(arrays, file, metadata={"teacher": NAMED})
    with pytest.raises(DataError, match=f"{file.name} is damaged: .*{message}"):
        SavedScores.open(file).of(batch().rows)
