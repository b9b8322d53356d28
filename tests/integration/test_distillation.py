"""Runs with a teacher in an engine of its own: a student that is its teacher learns nothing new, and steps replay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.test_replay_run import replay
from tests.integration.test_run import demo, train  # noqa: F401  # `demo` is a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("algorithm", ["opd", "opd_topk"])
def test_the_first_step_finds_no_difference_between_a_student_and_itself_as_teacher(
    algorithm: str,
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    (model,) = (setting.partition("=")[2] for setting in demo if setting.startswith("model.path="))
    train(
        *demo, f"algorithm={algorithm}", f"teacher.path={model}", "updates=2", f"run_root={tmp_path}", "run_name=own",
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "checkpoint.every=1", "checkpoint.keep=9",
        "logger.print_rollouts=0",
    )  # fmt: skip
    run = tmp_path / "own"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line.get("teacher/kl") is not None)
    assert abs(first["teacher/kl"]) < 1e-5
    assert first["teacher/kl_k3"] < 1e-7
    if algorithm == "opd_topk":
        assert abs(first["loss/teacher"]) < 1e-5, "less the floor of what the teacher leaves to other tokens"
        assert first["loss/teacher_tokens"] == first["rollout/trained_tokens"]
    status, said = replay(run, "--step", 2)
    assert status == 0, said
    equal, compared = re.findall(r"(\d+) of (\d+) numbers are equal", said)[0]
    assert equal == compared
    assert "teacher/kl" in said
