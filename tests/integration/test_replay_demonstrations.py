"""scripts/replay.py on updates with demonstrations, alone and beside rollouts, gives the same numbers bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from lockstep.trainer.sft.demonstration_rows import EPOCH
from tests.integration.test_replay_run import replay
from tests.integration.test_run import demo, train  # noqa: F401  # `demo` is a fixture
from tests.integration.test_sft_runs import settings  # noqa: F401  # a fixture

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

EVERY = ("checkpoint.every=1", "checkpoint.keep=99")


@pytest.fixture(scope="module")
def alone(settings: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Six updates of four conversations each, which go two and a half times through the data."""
    root = tmp_path_factory.mktemp("runs")
    train(*settings, *EVERY, f"run_root={root}", "run_name=sft", "demonstrations.rows_per_update=4")
    return root / "sft"


def compared(said: str) -> tuple[int, int]:
    equal, of_all = re.findall(r"(\d+) of (\d+) numbers are equal", said)[0]
    return int(equal), int(of_all)


def demonstrations_of(run: Path) -> Path:
    """Return the file that the saved configuration names."""
    return Path(re.findall(r"path: (\S+/talks\.jsonl)", (run / "config.yaml").read_text())[0])


@pytest.mark.parametrize("step", [1, 3, 6])
def test_an_update_on_demonstrations_alone_gives_the_same_bits(alone: Path, step: int) -> None:
    status, said = replay(alone, "--step", step)
    assert status == 0, said
    equal, of_all = compared(said)
    assert equal == of_all == 8
    assert "warning" not in said
    assert all(name in said for name in ("loss/demonstrations ", EPOCH, "optim/grad_norm"))


def test_without_the_checkpoint_of_the_step_its_conversations_are_still_taken(alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "older"
    shutil.copytree(alone, run, ignore=shutil.ignore_patterns("step-[456]", "latest"))
    status, said = replay(run, "--step", 6)
    assert status == 0, said
    assert "2 updates older" in said
    for name in (EPOCH, "loss/demonstrations_tokens"):
        assert re.search(rf"{name} .*\d$", said, re.MULTILINE), said
    assert re.search(r"loss/demonstrations .* differs", said)


def test_changed_demonstrations_are_named(alone: Path) -> None:
    path = demonstrations_of(alone)
    text = path.read_text()
    try:
        path.write_text("".join(text.splitlines(keepends=True)[:9]))
        status, said = replay(alone, "--step", 3)
        assert "there are 9 demonstrations, of which 8 had been taken" in said
        assert "0.8 passes" in said
        assert status == 1
        path.unlink()
        status, said = replay(alone, "--step", 3)
        assert status == 2
        assert "talks.jsonl" in said
        assert "Traceback" not in said
    finally:
        path.write_text(text)


def test_demonstrations_are_neither_sampled_nor_scored_by_a_teacher(alone: Path) -> None:
    for arguments, expected in (
        (("--sample",), "--sample needs a run with rollouts"),
        (
            ("demonstrations.teacher_divergence=forward", "teacher.path=x", "rollout.max_model_len=512"),
            "add demonstrations.teacher_divergence=off teacher.path=null",
        ),
    ):
        status, said = replay(alone, "--step", 3, *arguments)
        assert status == 2, said
        assert expected in said
        assert "Traceback" not in said


@pytest.mark.engine
@pytest.mark.slow
def test_a_step_with_rollouts_and_demonstrations_gives_the_same_bits(
    demo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    talks = [
        [{"role": "user", "content": f"compute {i}+{i}"}, {"role": "assistant", "content": f"The answer is {2 * i}"}]
        for i in range(11)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    train(
        *demo, *EVERY, "updates=8", f"run_root={tmp_path}", "run_name=both", "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4", "algorithm.minibatches=2", "logger.print_rollouts=0",
        f"demonstrations.path={path}", "demonstrations.rows_per_update=3",
    )  # fmt: skip
    status, said = replay(tmp_path / "both", "--step", 6)
    assert status == 0, said
    equal, of_all = compared(said)
    assert equal == of_all > 30
    assert "loss/demonstrations " in said
    assert EPOCH in said
