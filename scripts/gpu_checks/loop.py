"""Check of whole updates: scripts/train.py on a small task."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.demo.tokenizer import untrained
from scripts.gpu_checks.measured import Measured, above, below, equal, shown
from scripts.gpu_checks.subject import Subject

ROOT = Path(__file__).resolve().parents[2]
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250}
"""Dense bfloat16 peak by a word in the name of the GPU (NVIDIA's data sheets)."""
PREFIX = "rollout_correction/"


def python() -> str:
    """Return the Python for further processes: this one, or that of `PYTHON_EXEC`, which launchers of torch read."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def launched(config: str, ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts this program or `-m` module on several ranks."""
    launcher = [python(), "-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{config}.yaml"]
    return [*launcher, "--num_processes", str(ranks), "--main_process_port", "0", *arguments]


def loop(subject: Subject) -> list[Measured]:
    updates = subject.pick(5, 2)
    gpus = torch.cuda.device_count()
    name = "" if subject.rehearses else torch.cuda.get_device_name()
    peak = next((tflops for word, tflops in PEAK_TFLOPS.items() if word in name), None)
    settings = _settings(subject, updates, peak)
    command = [python(), "scripts/train.py", *settings]
    if gpus > 1:
        command = launched("zero3", gpus, ["scripts/train.py", *settings])
    subprocess.run(command, cwd=ROOT, check=True)
    written = (subject.directory / "runs" / "loop" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [line for line in map(json.loads, written) if "reward/mean" in line]
    kl, k3 = subject.pick((2e-3, 5e-3), (1e-5, 1e-5))
    found = [
        equal("updates", len(lines), updates),
        equal("token match rate, least", min(line["rollout/token_match_rate"] for line in lines), 1.0),
        below("|kl|, largest", max(abs(line[PREFIX + "kl"]) for line in lines), kl),
        below("k3, largest", max(line[PREFIX + "k3_kl"] for line in lines), k3),
        above("ess, least", min(line[PREFIX + "ess"] for line in lines), 0.95),
    ]
    if subject.rehearses:
        return found
    shares = {
        stage: statistics.median(line[f"time/{stage}"] / line["time/step"] for line in lines[1:])
        for stage in ("rollout", "reward", "score", "update", "sync")
    }
    found += [shown(f"{stage}, share of a step", share) for stage, share in shares.items() if stage != "sync"]
    found.append(below("sync, share of a step", shares["sync"], 0.1))
    if peak is not None:
        found.append(above("mfu, largest", max(line["perf/mfu"] for line in lines), 0.35))
    return found


def _settings(subject: Subject, updates: int, peak_tflops: float | None) -> list[str]:
    """Write data, reward and tokenizer, and return the settings of the run."""
    folder = subject.directory
    untrained().save_pretrained(subject.saved)
    rows = [{"question": f"compute {number} + 1", "answer": str(number + 1)} for number in range(256)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text("def coin(rollout): return float(sum(rollout.calls[-1].sampled_ids) % 2)\n")
    settings = {
        "model.path": subject.saved,
        "model.dtype": subject.dtype,
        "environment": "single_turn",
        "data.path": folder / "rows.jsonl",
        "data.heldout_path": "null",
        "reward.functions": f"[{folder}/reward.py:coin]",
        "reward.isolation": "thread",
        "rollout": subject.pick("colocated", "embedded"),
        "rollout.max_model_len": subject.pick(2048, 320),
        "rollout.prompts_per_step": subject.pick(64, 2),
        "rollout.samples_per_prompt": subject.pick(8, 4),
        "rollout.max_tokens_per_turn": subject.pick(1024, 16),
        "rollout.ignore_eos": "true",
        "token_budget": subject.pick(32_768, 1024),
        "optimizer.lr": "1e-6",
        "checkpoint.every": "0",
        "logger.print_rollouts_every": "0",
        "logger.peak_tflops": "null" if peak_tflops is None else peak_tflops,
        "updates": updates,
        "run_root": folder / "runs",
        "run_name": "loop",
    }
    return [f"{name}={value}" for name, value in settings.items()]
