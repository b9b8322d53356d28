"""Runs of scripts/train.py on the demo: they learn, write the promised files, end and resume cleanly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.demo.make import make_demo
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.saved_rollouts import read_rollouts
from lockstep.trainer.checkpoint import stored
from lockstep.trainer.evaluate.results import compare, read_results
from lockstep.trainer.run.hub import publish
from tests.fixtures import wandb_files
from tests.fixtures.composed import DEMO
from tests.fixtures.forked_python import forked_python
from tests.fixtures.processes import descendants, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SMALL = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=8", "logger.print_rollouts_every=0")


@pytest.fixture(scope="session")
def demo() -> tuple[str, ...]:
    """Overrides that name the demo, which is made if missing: model, training data, held-out data, experiment."""
    made = make_demo(
        "calculator", ROOT / "models/calculator", ROOT / "data/demo/calculator", 0, Console(file=sys.stderr)
    )
    return (
        f"model.path={made.model_dir}",
        f"data.path={made.data_dir}/train.jsonl",
        f"data.heldout_path={made.data_dir}/heldout.jsonl",
        DEMO,
    )


def command(
    *overrides: str, ranks: int | None = None, launcher_file: str = "zero3", python: str = sys.executable
) -> list[str]:
    """launcher_file: of `configs/accelerate/`, for several ranks."""
    launcher = [python]
    if ranks is not None:
        launcher += ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{launcher_file}.yaml",
                     "--num_processes", str(ranks), "--main_process_port", "0"]  # fmt: skip
    return [*launcher, "scripts/train.py", *overrides]


def train(
    *overrides: str,
    ranks: int | None = None,
    launcher_file: str = "zero3",
    timeout_s: float = 500,
    python: str | None = None,
) -> str:
    """Return the output of a run that succeeds. python: None for a fork (`tests/fixtures/forked_python.py`)."""
    python = python or forked_python()
    done = subprocess.run(
        command(*overrides, ranks=ranks, launcher_file=launcher_file, python=python),
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
        env={**os.environ, "PYTHON_EXEC": python, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first_run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Twelve updates in one process with W&B offline, evaluations and checkpoints."""
    root = tmp_path_factory.mktemp("runs")
    output = train(
        *demo, *SMALL, "updates=12", f"run_root={root}", "run_name=first", "checkpoint.every=4", "eval.every=12",
        "eval.before_training=true", "eval.prompts=24", "eval.samples_per_prompt=2", "eval.temperature=1.5",
        "eval.top_p=0.95", "logger.wandb=offline", "hub.repo=me/first",
    )  # fmt: skip
    return root / "first", output


def test_the_reward_rises(first_run: tuple[Path, str]) -> None:
    rewards = [line["reward/mean"] for line in metrics(first_run[0]) if "reward/mean" in line]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.15, rewards


COUNTS_FROZEN = """
import gc
from pathlib import Path

gc.unfreeze()  # the fork server has frozen its objects

def reward(completions, **_):
    Path(__file__).with_suffix(".count").write_text(str(gc.get_freeze_count()))
    return [float(index % 2) for index in range(len(completions))]
"""


def test_objects_of_the_start_are_frozen_out_of_garbage_collections(demo: tuple[str, ...], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(COUNTS_FROZEN)
    train(
        *demo, *SMALL, "updates=1", f"run_root={tmp_path}", "run_name=frozen", "checkpoint.every=0",
        f"reward.functions=['{reward}:reward']", "reward.isolation=thread",
    )  # fmt: skip
    assert int(reward.with_suffix(".count").read_text()) > 100_000


def test_every_update_has_one_line_with_its_evidence(first_run: tuple[Path, str]) -> None:
    lines = [line for line in metrics(first_run[0]) if "reward/mean" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert line["rollout/token_match_rate"] == 1.0
        assert line["rollout/trained_fraction"] == 1.0
        assert abs(line["rollout_correction/kl"]) < 1e-5
        assert line["rollout_correction/logp_diff_abs_max"] < 1e-3
        assert line["sync/canary_abs_diff"] < 1e-3
        assert line["sync/version"] == line["step"]
        assert line["rollout_correction/version_lag_max"] == 0


def test_the_end_of_the_run_and_its_last_checkpoint_are_published_with_the_same_weights(
    first_run: tuple[Path, str], tmp_path: Path
) -> None:
    run, output = first_run
    assert "nothing was uploaded (HF_HUB_OFFLINE); upload it with: hf upload me/first" in output
    publish(run, "me/first", checkpoint=12, out=tmp_path / "out")
    models = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (run / "hub", tmp_path / "out")]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    for folder in (run / "hub", tmp_path / "out"):
        assert AutoTokenizer.from_pretrained(folder).chat_template
        results = ModelCard.load(folder / "README.md").data.eval_results
        assert [result.metric_type for result in results or ()] == ["pass@1", "pass@2", "mean reward"]
        assert str(ROOT) not in (folder / "README.md").read_text()


def test_the_run_is_evaluated_before_and_after_on_the_same_seeds(first_run: tuple[Path, str]) -> None:
    lines = {line["step"]: line for line in metrics(first_run[0]) if "eval/reward_mean" in line}
    assert sorted(lines) == [0, 12]
    for line in lines.values():
        assert line["eval/rollouts"] == 48
        assert line["eval/pass@1_low"] < line["eval/pass@1"] <= line["eval/pass@2"] < line["eval/pass@2_high"]
    files = [first_run[0] / f"evaluations/update-{update:06d}.json" for update in (0, 12)]
    settings = json.loads(files[0].read_text())["settings"]
    before, after = (read_results(file, settings) for file in files)
    (comparison,) = compare(before, after)
    difference = comparison.differences["reward_mean"].value
    assert difference == pytest.approx(lines[12]["eval/reward_mean"] - lines[0]["eval/reward_mean"])
    assert difference > 0.1
    assert len(list(read_rollouts(files[1].with_suffix(".jsonl")))) == 48


def test_every_sampled_token_is_saved_and_trained(first_run: tuple[Path, str]) -> None:
    for update, line in enumerate((entry for entry in metrics(first_run[0]) if "reward/mean" in entry), start=1):
        rollouts = list(read_rollouts(first_run[0] / "rollouts" / f"step-{update:06d}.jsonl"))
        assert len(rollouts) == 64
        trained = sum(row.num_trained for rollout in rollouts for row in rows_from_calls(rollout.calls))
        assert trained == sum(rollout.num_sampled for rollout in rollouts) == line["rollout/trained_tokens"]


def test_the_rows_end_with_the_stop_token_of_the_last_turn(first_run: tuple[Path, str]) -> None:
    """The first bug of "KL Divergence Analysis" (jphme, gist, 2026): rows lacked the tokens of the last turn."""
    stop = AutoTokenizer.from_pretrained(first_run[0] / "model").convert_tokens_to_ids("<|im_end|>")
    for rollout in read_rollouts(first_run[0] / "rollouts" / "step-000012.jsonl"):
        last = rows_from_calls(rollout.calls)[-1]
        assert last.loss_mask[-1]
        if rollout.calls[-1].finish_reason == "stop":
            assert last.ids[-1] == stop


def test_the_saved_model_is_one_update_after_the_last_rollouts(first_run: tuple[Path, str]) -> None:
    """The saved policy is one update away from the sampler of the last rollouts; the base model is farther."""
    rollout = next(iter(read_rollouts(first_run[0] / "rollouts" / "step-000012.jsonl")))
    (row, *_) = rows_from_calls(rollout.calls)

    def distance(path: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            logp = model(torch.from_numpy(row.ids)[None]).logits[0, :-1].log_softmax(-1)
        logp = logp.gather(1, torch.from_numpy(row.ids)[1:, None])[:, 0].numpy()
        return float(np.abs(logp - row.sampling_logprobs[1:])[row.loss_mask[1:]].mean())

    assert 0 < distance(first_run[0] / "model") < distance(ROOT / "models/calculator")


def test_wandb_offline_has_the_metrics(first_run: tuple[Path, str]) -> None:
    files = list((first_run[0] / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 1
    content = files[0].read_bytes()
    for name in (b"rollout_correction/kl", b"reward/mean", b"sync/canary_abs_diff"):
        assert name in content


def test_the_last_lines_say_how_to_continue(first_run: tuple[Path, str]) -> None:
    output = first_run[1]
    for word in ("run directory", "resume", "lockstep evaluate", "lockstep inspect-run", "evaluation at update 12"):
        assert word in output


def test_the_last_evaluation_is_compared_with_the_one_before_training(first_run: tuple[Path, str]) -> None:
    assert "before training -> " in first_run[1]
    assert "update 12 minus update 0, on the same prompts" in first_run[1]


def test_checkpoints_are_whole_and_only_the_newest_are_kept(first_run: tuple[Path, str]) -> None:
    found, skipped = stored.complete(first_run[0] / "checkpoints")
    assert [path.name for path in found] == ["step-8", "step-12"]
    assert skipped == []


def test_a_step_can_be_replayed_bit_for_bit(first_run: tuple[Path, str]) -> None:
    """Update 9 starts from the weights in the checkpoint of update 8."""
    done = subprocess.run(
        [forked_python(), "scripts/replay.py", str(first_run[0]), "--step", "9"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "differs" not in done.stdout


def test_a_run_directory_is_not_overwritten(first_run: tuple[Path, str], demo: tuple[str, ...]) -> None:
    done = subprocess.run(
        command(*demo, f"run_root={first_run[0].parent}", "run_name=first", python=forked_python()),
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert "is not overwritten" in done.stderr
    assert "Traceback" not in done.stderr


def test_control_c_finishes_the_update_and_saves(demo: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "interrupted"
    process = subprocess.Popen(
        command(*demo, *SMALL, "updates=500", f"run_root={tmp_path}", "run_name=interrupted"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = descendants(process.pid) - {process.pid}
        assert children, "the engine has processes of its own"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    assert "everything is saved" in output
    last = metrics(run)[-1]["step"]
    found, _ = stored.complete(run / "checkpoints")
    assert found[-1].name == f"step-{last}"
    wait_until_gone(children, timeout_s=2)


@pytest.mark.distributed
def test_two_zero3_ranks_equal_one_process(demo: tuple[str, ...], tmp_path: Path) -> None:
    settings = (*demo, *SMALL, f"run_root={tmp_path}", "updates=6")
    train(*settings, "run_name=one", "updates=1")
    output = train(*settings, "run_name=two", "logger.wandb=offline", "logger.wandb_media_every=6", ranks=2)
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert one[0]["reward/mean"] == two[0]["reward/mean"], "the first rollouts do not depend on the trainer"
    assert two[0]["optim/grad_norm"] == pytest.approx(one[0]["optim/grad_norm"], rel=1e-5)
    assert two[0]["rollout_correction/k3_kl"] == pytest.approx(one[0]["rollout_correction/k3_kl"], abs=1e-9)
    assert [line["sync/version"] for line in two] == list(range(1, 7))
    assert max(line["sync/canary_abs_diff"] for line in two) < 1e-3
    rewards = [line["reward/mean"] for line in two]
    assert np.mean(rewards[-2:]) > rewards[0], rewards
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) > 500_000
    # One rank writes to the console and to W&B, and DeepSpeed to a file.
    assert output.count("update 1/6 ") == 1
    assert "DeepSpeed " not in output
    history = wandb_files.history(tmp_path / "two")
    assert [row["_step"] for row in history] == list(range(1, 7))
    assert history[-1]["media/rollouts"]["nrows"] == 64, "the rollouts of both ranks are in one table"


@pytest.mark.slow
def test_compiled_layers_train_like_plain_ones_beside_the_engine(
    demo: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine starts without compilation; the trainer in the same process must not inherit that."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    settings = (*demo, *SMALL, f"run_root={tmp_path}", "updates=3")
    assert "compiled   " not in train(*settings, "run_name=plain")
    assert not list((tmp_path / "inductor").rglob("*.so"))
    assert "compiled       2 Qwen3DecoderLayer" in train(*settings, "run_name=compiled", "model.compile=true")
    assert list((tmp_path / "inductor").rglob("*.so")), "nothing was compiled"
    plain, compiled = metrics(tmp_path / "plain"), metrics(tmp_path / "compiled")
    assert compiled[0]["reward/mean"] == plain[0]["reward/mean"]
    assert compiled[0]["optim/grad_norm"] == pytest.approx(plain[0]["optim/grad_norm"], rel=1e-4)
    graphs = [line["perf/compiled_graphs"] for line in compiled]
    assert 0 < graphs[0] <= graphs[-1] <= 10, "packs of later updates were compiled"
    assert "perf/compiled_graphs" not in plain[0]
    for line in compiled:
        assert line["rollout_correction/k3_kl"] < 1e-9
        assert line["sync/canary_abs_diff"] < 1e-3
        assert not line["health/alarms"]
