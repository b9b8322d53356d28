"""Scores of a teacher that were saved beside rollouts: found for each row, or the run does not start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout, TrainingRow
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.batch.saved_scores import FILE_SUFFIX, write_scores
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.demonstrations import Demonstration, Tokenized
from lockstep.trainer.sft import saved_teacher
from lockstep.trainer.sft.demonstration_rows import batch_of
from lockstep.trainer.sft.saved_teacher import SavedTeacher
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.fixtures.teachers import made_up_scores
from tests.unit.trainer.batch.test_step_batch import rollout

VOCAB_SIZE, TOP_K = 40, 4
STEPS = (range(0, 3), range(3, 5))


@pytest.fixture(autouse=True)
def _vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_teacher, "vocab_size_of", lambda path, **settings: VOCAB_SIZE)


def step(numbers: range) -> tuple[list[Rollout], StepBatch]:
    rollouts = [rollout(number, sampled=2 + number) for number in numbers]
    batch = StepBatch.of(rollouts, mask_truncated=False)
    return rollouts, replace(batch, teacher=made_up_scores(batch, top_k=TOP_K, vocab_size=VOCAB_SIZE, seed=numbers[0]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write two steps of a run with a teacher."""
    (tmp_path / "rollouts").mkdir()
    for number, numbers in enumerate(STEPS):
        path = tmp_path / "rollouts" / f"step-{number + 1:06d}.jsonl"
        rollouts, batch = step(numbers)
        assert batch.teacher is not None
        scores = replace(batch.teacher, version=np.array([number]))
        write_rollouts(path, rollouts)
        write_scores(path.with_suffix(FILE_SUFFIX), batch.rows, scores, teacher="teacher.source=model teacher.path=t")
    return tmp_path


def config(run: Path, top_k: int = TOP_K) -> Config:
    made = Config(algorithm=AlgorithmConfig(trains_on="demonstrations", teacher_divergence_top_k=top_k))
    made.data.path = f"rollouts:{run}"
    made.demonstrations.teacher_divergence = "forward"
    return made


def demonstrations(
    numbers: range, change: Callable[[TrainingRow], TrainingRow] = lambda row: row
) -> list[Demonstration]:
    return [tuple(Tokenized.of(change(row)) for row in rows_from_calls(one.calls)) for one in step(numbers)[0]]


def opened(
    run: Path, sets: list[list[Demonstration]], said: list[str] | None = None, top_k: int = TOP_K
) -> SavedTeacher:
    say = [].append if said is None else said.append
    made = config(run, top_k)
    data_sets = made.demonstration_sets().values()
    return SavedTeacher.open(data_sets, made.model, FakeRank(), sets, top_k=made.plan.teacher_top_k, say=say)


@pytest.mark.parametrize("top_k", [TOP_K, 2])
def test_rows_of_several_steps_get_their_scores_in_any_order(run: Path, top_k: int) -> None:
    first, second = (demonstrations(numbers) for numbers in STEPS)
    said: list[str] = []
    teacher = opened(run, [[*first, *second]], said, top_k)
    assert said == ["teacher        saved scores of teacher.source=model teacher.path=t, weights of versions 0 to 1"]
    found = teacher.scored(batch_of([second[1], first[0]]), ()).teacher
    assert found is not None
    of_first, of_second = (step(numbers)[1].teacher for numbers in STEPS)
    assert of_first is not None
    assert of_second is not None
    num_last = int(second[1][0].loss_mask.sum())
    num_first = int(first[0][0].loss_mask.sum())
    np.testing.assert_array_equal(found.logp, np.concatenate([of_second.logp[-num_last:], of_first.logp[:num_first]]))
    for name in ("top_ids", "top_logp"):
        parts = getattr(of_second, name)[-num_last:], getattr(of_first, name)[:num_first]
        np.testing.assert_array_equal(getattr(found, name), np.concatenate(parts)[:, :top_k])


def test_only_rank_0_reads_the_files(run: Path) -> None:
    sets = [demonstrations(STEPS[0])]

    made = config(run)
    data_sets = made.demonstration_sets().values()

    def scored(rank: FakeRank) -> StepBatch:
        own = sets if rank.is_main else None
        teacher = SavedTeacher.open(data_sets, made.model, rank, own, top_k=TOP_K, say=lambda text: None)
        return teacher.scored(batch_of(sets[0] if rank.is_main else []), ())

    main, other = on_ranks(2, scored)
    assert main.teacher is not None
    assert other.teacher is None


def test_a_row_without_scores_is_refused_before_the_first_update(run: Path) -> None:
    def longer_prompt(row: TrainingRow) -> TrainingRow:
        return replace(row, ids=np.where(row.loss_mask, row.ids, row.ids + 1))

    changed = demonstrations(range(1), longer_prompt)
    with pytest.raises(DataError, match=r"1 of 4 rows of the demonstrations have no saved scores .* teacher\.source="):
        opened(run, [demonstrations(STEPS[0]), changed])
    (run / "rollouts" / f"step-000002{FILE_SUFFIX}").unlink()
    with pytest.raises(DataError, match=r"step-000002\.teacher\.safetensors has no scores of a teacher"):
        opened(run, [demonstrations(STEPS[0])])


def test_too_few_probable_tokens_are_refused(run: Path) -> None:
    with pytest.raises(DataError, match=r"has the 4 most probable tokens, .*top_k=5; set algorithm\..*top_k=4, or"):
        opened(run, [demonstrations(STEPS[0])], top_k=5)


def test_tokens_that_the_student_does_not_have_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_teacher, "vocab_size_of", lambda path, **settings: 5)
    made = demonstrations(STEPS[0])
    with pytest.raises(DataError, match="but the student has 5 ids"):
        opened(run, [made])


def test_damaged_scores_are_refused_before_the_first_update(run: Path) -> None:
    path = run / "rollouts" / f"step-000001{FILE_SUFFIX}"
    arrays = safetensors.numpy.load_file(path)
    arrays["teacher_logp"][-1] = 3.0
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(DataError, match=r"step-000001\.teacher\.safetensors is damaged: .* logprob 3\.0"):
        opened(run, [demonstrations(STEPS[0])])
