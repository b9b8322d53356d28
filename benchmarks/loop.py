"""Time per phase of whole training steps, and mismatch between engine and trainer, on a model with random weights.

    python benchmarks/loop.py [--dtypes float32 bfloat16] [--hidden 192] [--layers 4] [--vocab 4096] [SETTING=VALUE ...]

Runs scripts/train.py once per dtype in one process, with one turn of exactly `--tokens` tokens. All numbers come from
metrics.jsonl of the run. Times are medians over all updates but the first; `share` is the share of the step. The
mismatch is that of the first update, with its noise floor: the trainer against itself in another packing. Further
settings of the run may follow.

On a GPU, with 0.6 B parameters in bfloat16, weights by CUDA IPC, and the engine asleep while the trainer computes (not
run yet):

    python benchmarks/loop.py --dtypes bfloat16 --hidden 1024 --layers 28 --vocab 151936 --prompts 64 --tokens 1024 \
        --peak-tflops 989 rollout=colocated rollout.max_num_seqs=512 token_budget=32768
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.models import small_qwen3
from harness.results import argument_parser, report
from harness.workloads import ROOT, WORKLOADS
from transformers import AutoTokenizer

RANDOM_REWARD = Path(__file__).parent / "harness" / "random_reward.py"
PROMPT_TOKENS = 96
"""Upper bound for the prompts of the task."""
PHASES = ("rollout", "reward", "score", "update", "sync")
RATES = ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s", "perf/mfu", "sync/gb_per_s")
MISMATCH = ("k3_kl", "noise_floor_k3", "logp_diff_abs_mean", "logp_diff_abs_max", "ess")
Metrics = dict[str, float]


def save_model(path: Path, args: argparse.Namespace) -> None:
    """Save a model with random weights, with the tokenizer of the task."""
    positions = PROMPT_TOKENS + args.tokens
    model = small_qwen3(hidden=args.hidden, layers=args.layers, vocab=args.vocab, max_positions=positions)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(WORKLOADS["single_equal"].model_path).save_pretrained(path)


def lines_of_run(model: Path, root: str, dtype: str, args: argparse.Namespace) -> list[Metrics]:
    """Run training; return the metrics of its updates."""
    workload = WORKLOADS["single_equal"]
    settings = [
        f"data={workload.task}",
        f"environment={workload.task}",
        f"model.path={model}",
        f"model.dtype={dtype}",
        f"data.path={workload.data_path}",
        "data.heldout_path=null",
        "environment.max_turns=1",
        f"rollout.prompts_per_step={args.prompts}",
        f"rollout.samples_per_prompt={args.samples}",
        f"rollout.max_tokens_per_turn={args.tokens}",
        f"rollout.max_model_len={PROMPT_TOKENS + args.tokens}",
        "rollout.ignore_eos=true",
        f"reward.functions=[{RANDOM_REWARD}:random_reward]",
        "reward.isolation=thread",
        "optimizer.lr=1e-6",
        f"updates={args.updates + 1}",
        f"correction.noise_floor_every={args.updates + 1}",
        "checkpoint.every=0",
        "logger.print_rollouts_every=0",
        f"run_root={root}",
        f"run_name={dtype}",
        *([f"logger.peak_tflops={args.peak_tflops}"] if args.peak_tflops else []),
        *args.settings,
    ]
    subprocess.run(
        [sys.executable, "scripts/train.py", *settings],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=sys.stderr,
        check=True,
    )
    lines = (json.loads(line) for line in (Path(root) / dtype / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step" in line]


def numbers_of(lines: list[Metrics]) -> Metrics:
    """Return the numbers of a run: times without the first update, which initializes; mismatch of the first alone."""
    first, *later = lines

    def typical(name: str) -> float:
        return statistics.median(line[name] for line in later)

    times = {phase: typical(f"time/{phase}") for phase in PHASES}
    rates = {name.partition("/")[2]: typical(name) for name in RATES if name in later[0]}
    mismatch = {name: first[f"rollout_correction/{name}"] for name in MISMATCH}
    step = typical("time/step")
    return {"step_s": step} | {f"{phase}_share": s / step for phase, s in times.items()} | rates | mismatch


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--vocab", type=int, default=4096, help="vocabulary; at least the 291 ids of the demo's tokenizer"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every response")
    parser.add_argument("--updates", type=int, default=5, help="measured updates, after an unmeasured one")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device in this dtype; adds `mfu`")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="further settings of the run")
    args = parser.parse_intermixed_args()
    if args.quick:
        args.hidden, args.layers, args.vocab, args.prompts, args.samples, args.tokens = 64, 2, 512, 2, 4, 8
        args.updates = 2
    WORKLOADS["single_equal"].prepare()
    numbers = {}
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        save_model(model, args)
        for dtype in args.dtypes:
            numbers[dtype] = numbers_of(lines_of_run(model, root, dtype, args))
    names = list(dict.fromkeys(name for of_dtype in numbers.values() for name in of_dtype))
    rows = [{"what": name} | {dtype: numbers[dtype].get(name, "") for dtype in numbers} for name in names]
    flat = {f"{dtype}_{name}": value for dtype, of_dtype in numbers.items() for name, value in of_dtype.items()}
    report("loop", rows, {}, as_json=args.json, details=flat)


if __name__ == "__main__":
    main()
