"""Short runs whose numbers are recorded beside this file. `python -m tests.golden.runs` records them again (README.md).

Each covers another way through a step. All sample from a real engine with the weights of `model.py`; user turns are
scripted and rewards are arithmetic on the sampled ids, so that nothing depends on a trained model.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.golden.model import save_golden_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UPDATES = 4

METRICS = (
    "policy/loss",
    "optim/grad_norm",
    "reward/mean",
    "rollout_correction/kl",
    "rollout_correction/k3_kl",
    "rollout/trained_tokens",
    "policy/entropy",
    "policy/clip_frac",
    "policy/ref_kl",
    "objective/kl",
    "ppo/value/loss",
    "value/explained_variance",
    "rollout/refill_factor",
)
"""Recorded of every update, where the run has them."""

REWARDS = """\
def share_of_low_ids(rollout):
    ids = [token for call in rollout.calls for token in call.sampled_ids]
    return sum(token < 128 for token in ids) / len(ids)


def first_id_is_low(rollout):
    return float(rollout.calls[0].sampled_ids[0] < 128)
"""

BASE = {
    "environment": "user",
    "data.heldout_path": "null",
    "environment.max_turns": 3,
    "rollout.max_model_len": 320,
    "rollout.max_tokens_per_turn": 24,
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "optimizer.lr": "2e-4",
    "updates": UPDATES,
    "checkpoint.every": 0,
    "logger.print_rollouts_every": 0,
    "reward.isolation": "thread",
    "share_prefixes": "never",
    "token_budget": 512,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRun:
    """A run and what is particular about it."""

    settings: dict[str, object]
    reward: str = "share_of_low_ids"
    ranks: int | None = None
    """ZeRO-3 ranks; None: one process without DeepSpeed."""


RUNS = {
    "grpo_multi_turn": GoldenRun(settings={"algorithm": "grpo"}),
    "grpo_zero3": GoldenRun(settings={"algorithm": "grpo", "algorithm.kl_coef": 0.05}, ranks=2),
    "ppo": GoldenRun(settings={"algorithm": "ppo", "algorithm.kl_coef": 0.05, "algorithm.epochs": 2}),
    "lora": GoldenRun(
        settings={"algorithm": "rloo", "model.lora.rank": 4, "model.lora.send": "merged", "optimizer.lr": "2e-3"}
    ),
    "dapo": GoldenRun(settings={"algorithm": "dapo", "rollout.samples_per_prompt": 3}, reward="first_id_is_low"),
    "gspo_two_minibatches": GoldenRun(settings={"algorithm": "gspo", "algorithm.minibatches": 2}),
    "bypass": GoldenRun(settings={"algorithm": "dr_grpo", "correction": "bypass"}),
    "shared_prefixes": GoldenRun(
        settings={"algorithm": "grpo", "share_prefixes": "always", "correction": "sequence_mask"}
    ),
    "bfloat16": GoldenRun(settings={"algorithm": "grpo", "model.dtype": "bfloat16"}),
    "bfloat16_zero3": GoldenRun(
        settings={"algorithm": "grpo", "algorithm.kl_coef": 0.05, "model.dtype": "bfloat16"}, ranks=2
    ),
}


def run(name: str, directory: Path, *, python: str = sys.executable) -> dict[str, Any]:
    """Train in `directory`, and return what is recorded: metrics per update and the SHA-256 of the final weights."""
    golden = RUNS[name]
    rows = [{"question": f"question {i}", "user_turns": [f"again {i}", "once more"]} for i in range(32)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rewards.py").write_text(REWARDS)
    settings = BASE | golden.settings | {
        "model.path": save_golden_model(directory / "start"),
        "data.path": directory / "rows.jsonl",
        "reward.functions": f"['{directory}/rewards.py:{golden.reward}']",
        "run_root": directory,
        "run_name": "run",
    }  # fmt: skip
    launcher = [python]
    if golden.ranks is not None:
        launcher += ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/zero3.yaml",
                     "--num_processes", str(golden.ranks), "--main_process_port", "0"]  # fmt: skip
    done = subprocess.run(
        [*launcher, "scripts/train.py", *(f"{key}={value}" for key, value in settings.items())],
        cwd=ROOT,
        env={**os.environ, "PYTHON_EXEC": python, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    updates = [
        {metric: line[metric] for metric in METRICS if metric in line} for line in lines if "reward/mean" in line
    ]
    return {
        "updates": updates,
        "weights": {part: weights_digest(directory / "run" / part) for part in _parts(directory)},
    }


def _parts(directory: Path) -> list[str]:
    return [part for part in ("model", "critic") if (directory / "run" / part).is_dir()]


def weights_digest(directory: Path) -> str:
    """SHA-256 over names, shapes and bytes of all tensors of a saved model, in the order of their names."""
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def machine() -> dict[str, str]:
    """Return the facts that bits depend on: the instruction set that selects kernels, and the kernels' versions."""
    first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first_core.splitlines())}
    packages = ("torch", "transformers", "deepspeed", "accelerate")
    return {
        "cpu": " ".join(facts[key] for key in ("model name", "cpu family", "model") if key in facts),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **{package: importlib.metadata.version(package) for package in packages},
    }


def record(names: list[str]) -> None:
    """Run each twice, refuse what differs between the two, and write `<name>.json`."""
    for name in names:
        found = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as directory:
                found.append(run(name, Path(directory)))
        if found[0] != found[1]:
            sys.exit(f"{name} differs between two runs on this machine; its numbers are no golden ones:\n{found}")
        (HERE / f"{name}.json").write_text(json.dumps({"machine": machine(), **found[0]}, indent=1) + "\n")
        print(f"{name}: {found[0]['updates'][-1]}", flush=True)


if __name__ == "__main__":
    record(sys.argv[1:] or sorted(RUNS))
