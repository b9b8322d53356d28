"""Checks of whole runs: scripts/train.py on a small task, in the forms that GPU users choose."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lockstep.demo.tokenizer import untrained
from lockstep.scripts.gpu_checks.measured import Measured, above, below, equal, unbounded
from lockstep.scripts.gpu_checks.subject import Subject
from lockstep.trainer.compose import CONFIG_DIR

PREFIX = "rollout_correction/"
KL, K3 = (2e-3, 1e-5), (5e-3, 1e-5)
"""Bounds of |mean Δ| and of k3, on a GPU in bfloat16 and in a rehearsal in float32."""
STALE = (1e-2, 1e-2)
"""The same for rollouts of older weights."""
LEAST_SHARE = 0.25
"""Least share of the measured rate of products that the update of `loop` reaches. By counted operations 0.4: of 10 µs a
token at 750 TFLOP/s and 2.6 TB/s, products take 5.4, the head's passes over its logits 2, norms, rotations and
activations 2.5."""
BIG = {
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""Sizes of the model of `loop`, in which layers outweigh the head as they do in models that people train."""


def python() -> str:
    """Return the Python for further processes: this one, or that of `PYTHON_EXEC`, which launchers of torch read."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


def launched(config: str, ranks: int, arguments: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """Return the command that starts this program or `-m` module on several ranks."""
    file = CONFIG_DIR / "accelerate" / f"{config}.yaml"
    launcher = [python(), "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return [*launcher, "--num_processes", str(ranks), "--main_process_port", "0", *flags, *arguments]


def first_update(subject: Subject) -> list[Measured]:
    settings = {"profile": "true", "profile_steps": 1}
    lines = _run(subject, "first", 2, settings)
    measurements = _sound(subject, "", lines, 2)
    seconds = {name: lines[-1][f"time/{name}"] for name in ("rollout", "score", "update", "sync") if lines}
    measurements += [unbounded(f"{name}, s", value) for name, value in seconds.items()]
    return measurements + [
        unbounded(f"sync, {part}", lines[-1][f"sync/{part}"]) for part in ("gather_s", "transfer_s", "pause_s")
    ]


def loop(subject: Subject) -> list[Measured]:
    updates = subject.pick(5, 2)
    gpus = torch.cuda.device_count()
    rate = 1.0 if subject.rehearses else _product_rate()
    settings = {**_big(subject), "logger.peak_tflops": rate}
    lines = _run(subject, "loop", updates, settings, launcher="zero3" if gpus > 1 else None, ranks=gpus)
    measurements = _sound(subject, "", lines, updates)
    if subject.rehearses:
        return measurements
    shares = {
        stage: statistics.median(line[f"time/{stage}"] / line["time/step"] for line in lines[1:])  # the first compiles
        for stage in ("rollout", "reward", "score", "update", "sync")
    }
    return [
        *measurements,
        *(unbounded(f"{stage}, share of a step", share) for stage, share in shares.items() if stage != "sync"),
        below("sync, share of a step", shares["sync"], 0.1),
        unbounded("products of this GPU, TFLOP/s", rate),
        above("update, share of that rate, largest", max(line["perf/mfu"] for line in lines), LEAST_SHARE),
    ]


def _product_rate(size: int = 8192, times: int = 10) -> float:
    """Return the rate of the fastest of several products of bfloat16 matrices on this GPU [10¹² FLOP/s]."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        left @ right
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds) / 1e12


def ranks(subject: Subject) -> list[Measured]:
    gpus = torch.cuda.device_count()
    measurements = []
    for launcher in ("ddp", "zero2", "zero3"):
        lines = _run(subject, launcher, 2, {}, launcher=launcher, ranks=gpus)
        measurements += _sound(subject, f"{launcher}: ", lines, 2)
    return measurements


def stale(subject: Subject) -> list[Measured]:
    lines = _run(subject, "stale", 4, {"rollout.max_staleness": 1})
    return [
        *_sound(subject, "", lines, 4, is_stale=True),
        unbounded("rollouts dropped as too old", sum(line["rollout/dropped_stale"] for line in lines)),
    ]


def resume(subject: Subject) -> list[Measured]:
    settings = {"checkpoint.every": 1}
    before = _run(subject, "resume", 2, settings)
    after = _run(subject, "resume", 4, {**settings, "resume": "auto"})
    return [
        equal("updates before and after", f"{len(before)} and {len(after)}", "2 and 4"),
        *_sound(subject, "", after, 4),
    ]


def critic(subject: Subject) -> list[Measured]:
    settings = {"algorithm": "ppo", "algorithm.kl_coef": 0.05}
    lines = _run(subject, "critic", 2, settings, launcher="zero3", ranks=max(1, torch.cuda.device_count()))
    return [
        *_sound(subject, "", lines, 2),
        below("KL to the reference before the first update", abs(lines[0]["objective/kl"]), subject.pick(1e-2, 1e-5)),
    ]


def mixture(subject: Subject) -> list[Measured]:
    config = Qwen3MoeConfig(
        **subject.config().to_dict()
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": subject.pick(768, 64), "model_type": ""}
    )
    measurements = []
    for replay in ("none", "engine"):
        settings = {"model.path": _saved(subject, "mixture", config), "correction.routing_replay": replay}
        lines = _run(subject, f"mixture-{replay}", 2, settings)
        measurements += _sound(
            subject, f"routes of {'the engine' if replay == 'engine' else 'the trainer'}: ", lines, 2
        )
    return measurements


def long_row(subject: Subject) -> list[Measured]:
    length = subject.pick(16_384, 256)
    settings = {
        "model.path": _saved(subject, "long", subject.config(max_position_embeddings=length + 64)),
        "rollout.max_model_len": length + 64,
        "rollout.max_tokens_per_turn": length,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 4,
        "token_budget": length + 64,
    }
    return _sound(subject, "", _run(subject, "long", 2, settings), 2)


def adapter_ranks(subject: Subject) -> list[Measured]:
    gpus = torch.cuda.device_count()
    measurements = []
    for launcher in ("ddp", "zero3"):
        settings = {"method": "lora", "optimizer.lr": 1e-6}
        lines = _run(subject, f"lora-{launcher}", 2, settings, launcher=launcher, ranks=gpus)
        measurements += _sound(subject, f"{launcher}: ", lines, 2)
    return measurements


def offload(subject: Subject) -> list[Measured]:
    flags = ["--offload_optimizer_device", "cpu", "--offload_param_device", "cpu"]
    gpus = max(1, torch.cuda.device_count())
    return _sound(subject, "", _run(subject, "offload", 2, {}, launcher="zero3", ranks=gpus, flags=flags), 2)


def adam_8bit(subject: Subject) -> list[Measured]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return [unbounded("bitsandbytes", "not installed: pip install bitsandbytes")]
    return _sound(subject, "", _run(subject, "adam-8bit", 2, {"optimizer": "adamw_8bit", "optimizer.lr": 1e-6}), 2)


def _sound(
    subject: Subject, name: str, lines: Sequence[Mapping[str, Any]], updates: int, *, is_stale: bool = False
) -> list[Measured]:
    """Expect that all updates were made, on tokens and logprobs that engine and trainer agree on.

    is_stale: the rollouts are from older weights, whose KL adds to that of the precision.
    """
    kl, k3 = STALE if is_stale else (subject.pick(*KL), subject.pick(*K3))
    measurements = [equal(f"{name}updates", len(lines), updates)]
    if not lines:
        return measurements
    return [
        *measurements,
        equal(f"{name}token match rate, least", min(line["rollout/token_match_rate"] for line in lines), 1.0),
        below(f"{name}|kl|, largest", max(abs(line[PREFIX + "kl"]) for line in lines), kl),
        below(f"{name}k3, largest", max(line[PREFIX + "k3_kl"] for line in lines), k3),
        above(f"{name}ess, least", min(line[PREFIX + "ess"] for line in lines), 0.9 if is_stale else 0.95),
    ]


def _saved(subject: Subject, name: str, config: Any) -> Path:
    """Write a model with random weights and the tokenizer, once; return its directory."""
    path = subject.directory / name
    if not path.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(
            torch.bfloat16 if not subject.rehearses else torch.float32
        ).save_pretrained(path)
        untrained().save_pretrained(path)
    return path


def _big(subject: Subject) -> dict[str, Any]:
    """Return the settings of `loop`: a model and a batch whose update can reach the rates of the GPU."""
    if subject.rehearses:
        return {}
    return {
        "model.path": _saved(subject, "big", subject.config(**BIG)),
        "rollout.prompts_per_step": 32,
        "rollout.samples_per_prompt": 8,
        "rollout.max_tokens_per_turn": 1024,
        "token_budget": 16_384,
    }


def _run(
    subject: Subject,
    name: str,
    updates: int,
    changes: Mapping[str, Any],
    *,
    launcher: str | None = None,
    ranks: int = 1,
    flags: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Train, and return the metrics of each update.

    launcher: name of a file in configs/accelerate/; None: one process without a launcher.
    """
    settings = [f"{key}={value}" for key, value in (_settings(subject, name, updates) | dict(changes)).items()]
    command = [python(), "-m", "lockstep", "train", *settings]
    if launcher is not None:
        command = launched(launcher, ranks, ["-m", "lockstep", "train", *settings], flags)
    subprocess.run(command, check=True)
    lines = (subject.directory / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "reward/mean" in line]


def _settings(subject: Subject, name: str, updates: int) -> dict[str, Any]:
    """Write data, reward and tokenizer, and return the settings of a run."""
    folder = subject.directory
    untrained().save_pretrained(subject.saved)
    rows = [{"question": f"compute {number} + 1", "answer": str(number + 1)} for number in range(256)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text("def coin(rollout): return float(sum(rollout.calls[-1].sampled_ids) % 2)\n")
    return {
        "model.path": subject.saved,
        "model.dtype": subject.dtype,
        "environment": "single_turn",
        "data.path": folder / "rows.jsonl",
        "data.heldout_path": "null",
        "reward.functions": f"[{folder}/reward.py:coin]",
        "reward.isolation": "thread",
        "rollout": subject.pick("colocated", "embedded"),
        "rollout.max_model_len": subject.pick(2048, 320),
        "rollout.prompts_per_step": subject.pick(16, 2),
        "rollout.samples_per_prompt": subject.pick(8, 4),
        "rollout.max_tokens_per_turn": subject.pick(256, 16),
        "rollout.ignore_eos": "true",
        "token_budget": subject.pick(16_384, 1024),
        "optimizer.lr": "1e-6",
        "checkpoint.every": "0",
        "logger.print_rollouts_every": "0",
        "updates": updates,
        "run_root": folder / "runs",
        "run_name": name,
    }
