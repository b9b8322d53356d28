"""Runs with LoRA adapters: sent alone on one process and two ZeRO-3 ranks, saved, continued, evaluated, quantized."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lockstep.scripts.gpu_checks.quantized_checkpoint import write_quantized_checkpoint
from tests.fixtures.forked_python import forked_python
from tests.fixtures.kills import differences
from tests.integration.test_exact_resume import recipe, step_seconds
from tests.integration.test_run import ROOT, SMALL, demo, metrics, train

__all__ = ["demo"]  # the fixture: the demo's model and data

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LORA = ("model.lora.rank=8", "model.lora.alpha=16", "optimizer.lr=3e-3")


@pytest.fixture(scope="module")
def adapted_run(demo: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten updates of adapters in one process."""
    root = tmp_path_factory.mktemp("adapted")
    train(
        *demo, *SMALL, *LORA, "updates=10", f"run_root={root}", "run_name=first", "checkpoint.every=5",
        "checkpoint.keep=9", "correction.noise_floor_every=5",
    )  # fmt: skip
    return root / "first"


def steps(run: Path) -> list[dict[str, float]]:
    return [line for line in metrics(run) if "reward/mean" in line]


def check_agreement(run: Path) -> None:
    for line in steps(run):
        assert line["rollout/token_match_rate"] == 1.0
        assert line["rollout_correction/logp_diff_abs_max"] < 1e-3
        assert line["sync/canary_abs_diff"] < 1e-3


def test_a_run_sends_adapters_alone_and_learns(adapted_run: Path, demo: tuple[str, ...]) -> None:
    check_agreement(adapted_run)
    whole = 4 * AutoModelForCausalLM.from_pretrained(demo[0].removeprefix("model.path=")).num_parameters()
    assert {line["sync/bytes"] for line in steps(adapted_run)} == {steps(adapted_run)[0]["sync/bytes"]}
    assert steps(adapted_run)[0]["sync/bytes"] < 0.4 * whole
    rewards = [line["reward/mean"] for line in steps(adapted_run)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.1, rewards


def test_checkpoints_and_the_finished_run_have_the_adapter(adapted_run: Path, demo: tuple[str, ...]) -> None:
    base = AutoModelForCausalLM.from_pretrained(demo[0].removeprefix("model.path="))
    last = PeftModel.from_pretrained(base, str(adapted_run / "model/adapter")).state_dict()
    saved = {
        step: PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base.name_or_path),
            str(adapted_run / f"checkpoints/step-{step}/adapter"),
        ).state_dict()
        for step in (5, 10)
    }
    adapters = [name for name in last if "lora_" in name]
    assert all(saved[10][name].equal(last[name]) for name in adapters)
    assert not any(saved[5][name].equal(last[name]) for name in adapters)


def test_evaluation_compares_base_and_adapters_in_one_engine(
    adapted_run: Path, demo: tuple[str, ...], tmp_path: Path
) -> None:
    adapters = f"{{half: {adapted_run}/checkpoints/step-5/adapter, last: {adapted_run}/model/adapter}}"
    python = forked_python()
    done = subprocess.run(
        [
            *(python, "scripts/evaluate.py", *demo, f"model.adapters={adapters}", "eval.prompts=32"),
            *("eval.samples_per_prompt=4", "eval.temperature=1.0", f"eval.output={tmp_path}/found.json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    means = {name: found[f"{name}/eval/reward_mean"] for name in ("base", "half", "last")}
    assert means["last"] > means["base"] + 0.1, means
    assert (tmp_path / "found.last.json").exists()
    assert found["last/eval/difference/reward_mean"] == pytest.approx(means["last"] - means["base"])
    assert found["half/eval/difference/reward_mean"] == pytest.approx(means["half"] - means["base"])


def test_a_run_continues_from_an_adapter_on_disk(adapted_run: Path, demo: tuple[str, ...], tmp_path: Path) -> None:
    train(
        *demo, *SMALL, *LORA, f"model.lora.path={adapted_run}/model/adapter", "updates=1", f"run_root={tmp_path}",
        "run_name=second",
    )  # fmt: skip
    check_agreement(tmp_path / "second")
    first, second = steps(adapted_run), steps(tmp_path / "second")
    assert second[0]["reward/mean"] > first[0]["reward/mean"] + 0.1


@pytest.mark.distributed
@pytest.mark.parametrize("engine", [pytest.param("embedded", marks=pytest.mark.slow), "colocated"])
def test_two_zero3_ranks_send_adapters_alone(engine: str, demo: tuple[str, ...], tmp_path: Path) -> None:
    train(
        *demo, *SMALL, *LORA, f"rollout={engine}", "updates=3", f"run_root={tmp_path}", "run_name=two", ranks=2
    )  # fmt: skip
    check_agreement(tmp_path / "two")
    assert (tmp_path / "two/model/adapter/adapter_model.safetensors").exists()


@pytest.mark.distributed
@pytest.mark.parametrize("launcher_file", [pytest.param("ddp", marks=pytest.mark.slow), "zero2"])
def test_two_ranks_train_adapters_on_quantized_weights(
    launcher_file: str, demo: tuple[str, ...], tmp_path: Path
) -> None:
    base = tmp_path / "w8a8"
    write_quantized_checkpoint(Path(demo[0].removeprefix("model.path=")), base)
    train(
        f"model.path={base}", *demo[1:], *SMALL, *LORA, "updates=3", f"run_root={tmp_path}", "run_name=two", ranks=2,
        launcher_file=launcher_file,
    )  # fmt: skip
    lines = steps(tmp_path / "two")
    assert all(line["rollout/token_match_rate"] == 1.0 for line in lines)
    # Activations are rounded in sampling, so k3 grows with the adapters: here from 4e-4 to 4e-3, as in one process.
    assert lines[0]["rollout_correction/k3_kl"] < 1e-3
    assert lines[-1]["rollout_correction/k3_kl"] < 1e-2
    assert (tmp_path / "two/model/adapter/adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_killed_run_with_adapters_goes_on_bit_for_bit(demo: tuple[str, ...], tmp_path: Path) -> None:
    runs = recipe(demo, tmp_path, "model.lora.rank=8", "updates=4")
    whole = runs.finish("whole")
    runs.kill("killed", random.Random(1), span_s=step_seconds(whole), after_update=2)
    assert differences(whole, runs.finish("killed")) == []


def test_adapters_on_quantized_weights_learn_and_resume(demo: tuple[str, ...], tmp_path: Path) -> None:
    """The engine keeps the int8 weights of the checkpoint; the trainer computes with the same numbers, dequantized."""
    base = tmp_path / "w8a8"
    write_quantized_checkpoint(Path(demo[0].removeprefix("model.path=")), base)
    own = (f"model.path={base}", *demo[1:], *SMALL, *LORA, f"run_root={tmp_path}", "run_name=q", "checkpoint.every=4")
    out = train(*own, "updates=8")
    lines = steps(tmp_path / "q")
    assert all(line["rollout/token_match_rate"] == 1.0 for line in lines)
    assert {line["sync/bytes"] for line in lines} == {lines[0]["sync/bytes"]}, "adapters only"
    assert lines[0]["sync/bytes"] < 0.4 * 4 * AutoModelForCausalLM.from_pretrained(base).num_parameters()
    floor = lines[0]["rollout_correction/quantization_k3"]
    assert 1e-6 < floor < 1e-2, "the engine rounds activations, which the trainer does not"
    assert lines[-1]["rollout_correction/k3_kl"] < 10 * floor
    rewards = [line["reward/mean"] for line in lines]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:2]) + 0.1, rewards
    assert not (tmp_path / "q/model/model.safetensors").exists(), "quantized weights cannot be merged"
    assert f"model.adapters={{trained: {tmp_path}/q/model/adapter}}" in out.replace("'", "")
    train(*own, "updates=9", "resume=auto")
    assert steps(tmp_path / "q")[-1]["rollout_correction/k3_kl"] < 10 * floor


def test_quantized_rollouts_are_corrected_and_their_cost_is_measured(demo: tuple[str, ...], tmp_path: Path) -> None:
    train(
        *demo, *SMALL, "model.dtype=bfloat16", "rollout.quantization=fp8_per_channel", "updates=3",
        f"run_root={tmp_path}", "run_name=fp8",
    )  # fmt: skip
    lines = steps(tmp_path / "fp8")
    cost = {line["rollout_correction/quantization_k3"] for line in lines}
    assert cost == {lines[0]["rollout_correction/k3_kl"]}
    assert 1e-4 < cost.pop() < 0.1
    assert 0.5 < lines[0]["rollout_correction/quantization_ess"] < 1
    for line in lines:
        assert line["rollout/token_match_rate"] == 1.0
        assert line["rollout_correction/k3_kl"] < 0.2, "the engine gets the weights"
