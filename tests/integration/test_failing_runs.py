"""Runs that end by an error: what they save, and what they say; and evaluations, which end no run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.trainer.checkpoint import stored
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.policies import TOKENIZER
from tests.fixtures.processes import descendants, wait_until_gone
from tests.fixtures.ranks import accelerate, run_ranks

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REWARD = """
from pathlib import Path

CALLS = Path(__file__).with_suffix(".calls")

def score(completions, answer, **columns):
    calls = int(CALLS.read_text()) if CALLS.exists() else 0
    CALLS.write_text(str(calls + 1))
    if calls == 2:
        raise KeyError("ground_truth")
    return [float(index % 3) for index, _ in enumerate(completions)]

def held_out_fails(completions, answer, **columns):
    return [columns["missing"] if value == "held out" else float(index % 3) for index, value in enumerate(answer)]
"""


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, ...]:
    """Write a model, data and rewards as a user has them; return the overrides of a small run on them."""
    tiny_qwen3(tied=True).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    for name, answers in (("rows", "0123456789"), ("heldout", ["held out"] * 2)):
        rows = [{"prompt": f"What is {index}+{index}?", "answer": answer} for index, answer in enumerate(answers)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return (
        f"model.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl", "data.heldout_path=null",
        "environment=single_turn", f"reward.functions=[{tmp_path}/reward.py:score]", "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=4", "rollout.max_tokens_per_turn=16", "rollout.max_model_len=128",
        "rollout.kv_cache_gib=0.0625", "updates=4", "checkpoint.every=0", "logger.print_rollouts=0",
        f"run_root={tmp_path}/runs", "run_name=own",
    )  # fmt: skip


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the script in one process, which is a fork."""
    return run_ranks((), "scripts/train.py", *words, timeout_s=400)


def lines_of(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "runs/own/metrics.jsonl").read_text().splitlines()]


def saved_updates(directory: Path) -> list[str]:
    found, skipped = stored.complete(directory / "runs/own/checkpoints")
    assert skipped == []
    return [path.name for path in found]


LAUNCHERS = {"one process": (), "ddp": accelerate("ddp"), "zero3": accelerate("zero3")}


@pytest.mark.parametrize(
    "launcher",
    [
        "one process",
        pytest.param("ddp", marks=[pytest.mark.distributed, pytest.mark.slow]),
        pytest.param("zero3", marks=pytest.mark.distributed),
    ],
)
def test_a_run_that_ends_by_an_error_saves_its_last_update_and_goes_on(
    own: tuple[str, ...], tmp_path: Path, launcher: str
) -> None:
    done = run_ranks(LAUNCHERS[launcher], "scripts/train.py", *own, timeout_s=400)
    assert done.returncode != 0, done.stdout
    said = " ".join(done.stderr.split())
    assert "8 of 8 reward calls failed, expected at most 50% of a step" in said, said[-3000:]
    assert f"reward score: exception: KeyError in line 10 of {tmp_path}/reward.py: 'ground_truth' (line " in said
    assert f" of {tmp_path}/rows.jsonl)" in said
    assert "Triton" not in said
    assert saved_updates(tmp_path) == ["step-2"]
    (command,) = {line.partition("to go on: ")[2] for line in done.stderr.splitlines() if "to go on" in line}
    assert "update 2 is saved; to go on: " in done.stderr
    words = shlex.split(command)
    resumed = run_ranks(LAUNCHERS[launcher], "scripts/train.py", *words[words.index("train") + 1 :], timeout_s=400)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "at update 2" in resumed.stdout
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[2]["data/epoch"] == pytest.approx(0.6), "the rows of the step that failed are taken again"
    assert saved_updates(tmp_path) == ["step-2", "step-4"]


@pytest.mark.distributed
@pytest.mark.parametrize("place", ["alone", "halfway"])
def test_a_rank_that_fails_alone_or_within_an_update_saves_nothing(
    own: tuple[str, ...], tmp_path: Path, place: str
) -> None:
    worker = Path(__file__).parent / "workers" / "failing_rank.py"
    reward = f"reward.functions=[{tmp_path}/reward.py:held_out_fails]"
    done = run_ranks(
        LAUNCHERS["zero3"], worker, place, *own, reward, "updates=8", "algorithm.minibatches=2", timeout_s=400
    )
    assert done.returncode != 0
    why = "the ranks did not fail together" if place == "alone" else "the next one failed halfway"
    assert f"no update is saved (update 4 is not, because {why}); to go on: " in done.stderr, done.stderr[-3000:]
    assert saved_updates(tmp_path) == []


def test_an_evaluation_that_fails_does_not_end_the_run(own: tuple[str, ...], tmp_path: Path) -> None:
    done = run(
        *own, "updates=2", f"reward.functions=[{tmp_path}/reward.py:held_out_fails]", "eval.every=1",
        f"data.heldout_path={tmp_path}/heldout.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert said.count("an evaluation failed (RewardError: 2 of 2 reward calls failed") == 1, said[-3000:]
    assert f"KeyError in line 14 of {tmp_path}/reward.py: 'missing' (line 1 of {tmp_path}/heldout.jsonl)" in said
    lines = lines_of(tmp_path)
    assert [line["health/logger_errors"] for line in lines] == [1, 2]
    assert (tmp_path / "runs/own/model/model.safetensors").is_file()


@pytest.mark.parametrize("loads", ["libtorch", "the engine"])
def test_control_c_before_the_first_update_ends_without_a_traceback(
    own: tuple[str, ...], tmp_path: Path, loads: str
) -> None:
    log = tmp_path / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "scripts/train.py", *own],
            cwd=ROOT, stdout=output, stderr=output, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not (
            "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
            if loads == "libtorch"
            else (tmp_path / "runs/own/logs/engine.log").exists()
        ):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = descendants(process.pid) - {process.pid}
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 130, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert log.read_text().splitlines()[-1] == "lockstep: interrupted"
    assert "Traceback" not in log.read_text()
    wait_until_gone(children, timeout_s=20)
