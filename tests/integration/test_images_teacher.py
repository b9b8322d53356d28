"""Runs with a teacher that sees the images of the rollouts, against transformers' own forward of the whole teacher; a
student learns from their saved rollouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.records import TrainingRow
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.trainer.batch.saved_scores import FILE_SUFFIX, SavedScores, row_digest
from tests.fixtures.servers import running
from tests.fixtures.vision import full_logprobs, image_processing
from tests.integration.test_images_run import directory, largest_difference, train  # noqa: F401  # a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TAUGHT = {"algorithm": "opd_topk", "algorithm.teacher_divergence_top_k": 5}


@pytest.fixture(scope="module")
def teacher(directory: Path) -> Path:  # noqa: F811
    """Return another checkpoint of the student's family, whose tower differs, too."""
    model = AutoModelForImageTextToText.from_pretrained(directory / "model", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    path = directory / "teacher"
    model.save_pretrained(path)
    for file in (directory / "model").iterdir():
        if not (path / file.name).exists():
            (path / file.name).write_bytes(file.read_bytes())
    return path


def scored_rows(run: Path) -> list[tuple[TrainingRow, np.ndarray]]:
    """Return the rows of the first step with the saved scores of their trained tokens."""
    saved = SavedScores.open(run / "rollouts" / f"step-000001{FILE_SUFFIX}")
    rows = [
        row
        for rollout in read_rollouts(run / "rollouts/step-000001.jsonl")
        for row in rows_from_calls(rollout.calls)
        if rollout.calls and row.num_trained
    ]
    places = {digest: index for index, digest in enumerate(saved.digests)}
    found = [(row, places.get(row_digest(row))) for row in rows]
    return [(row, saved.between(i, i + 1, top_k=0).logp) for row, i in found if i is not None]


def teacher_mismatch(run: Path, teacher: Path) -> float:
    """Return the largest difference between saved scores and logprobs by transformers, over rows with images."""
    images = image_processing(teacher, ImageStore(run / "media"))
    model = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32).eval()
    differences = []
    for row, scores in scored_rows(run):
        if row.images:
            expected = full_logprobs(model, images, row.ids.tolist(), row.images)[row.loss_mask[1:]]
            differences.append(float((torch.from_numpy(scores) - expected).abs().max()))
    assert len(differences) > 8
    return max(differences)


def test_a_teacher_scores_rows_with_the_images_of_their_rollouts_and_a_student_learns_from_both(
    directory: Path,  # noqa: F811
    teacher: Path,
) -> None:
    steps = train(directory, "taught", **TAUGHT, **{"teacher.path": teacher})
    run = directory / "runs/taught"
    assert steps[0]["teacher/canary_abs_diff"] < 1e-4
    assert steps[0]["teacher/kl_k3"] > 0.01
    assert largest_difference(steps) < 1e-4
    assert teacher_mismatch(run, teacher) < 1e-4
    assert any(len(row.images) > 2 for row, _ in scored_rows(run)), "images of the data row and of turn 2"

    saved = {
        "algorithm": "sft",
        "data.path": f"rollouts:{run}",
        "demonstrations.rows_per_update": 16,
        "demonstrations.teacher_divergence": "forward",
        "algorithm.teacher_divergence_top_k": 5,
    }
    one = train(directory, "from_saved", **saved, **{"teacher.source": "saved"})
    other = train(directory, "from_engine", **saved, **{"teacher.path": teacher})
    for name in ("from_saved", "from_engine"):
        assert {file.name for file in (directory / "runs" / name / "media").iterdir()} <= {
            file.name for file in (run / "media").iterdir()
        }
    for line, expected in zip(one, other, strict=True):
        assert line["loss/demonstrations_teacher"] == pytest.approx(expected["loss/demonstrations_teacher"], rel=1e-4)


def test_an_average_of_the_policy_sees_images_and_a_context(directory: Path) -> None:  # noqa: F811
    context = {"teacher.source": "average", "teacher.context": '"it is number {number}"'}
    steps = train(directory, "averaged", **TAUGHT, **context, **{"model.images.train_tower": "true"})
    assert steps[0]["teacher/with_context"] == 1
    assert steps[0]["teacher/kl_k3"] > 1e-4, "the context is read"
    assert max(step["teacher/canary_abs_diff"] for step in steps) < 1e-4


def test_servers_of_a_teacher_are_sent_images(directory: Path, teacher: Path) -> None:  # noqa: F811
    settings = {"model.images.max_per_prompt": 3, "rollout.max_model_len": 257}
    with running(teacher, directory, **settings) as (server,):
        steps = train(
            directory, "served_teacher", **TAUGHT, **{"teacher.path": teacher, "teacher.urls": f"[{server.url}]"}
        )
    assert steps[0]["teacher/canary_abs_diff"] < 1e-4
    assert teacher_mismatch(directory / "runs/served_teacher", teacher) < 1e-4
