"""Rollout corrections ranked by `lockstep compare-objectives` and by what they do, on stale rollouts.

    python benchmarks/objective_ranking.py [--seeds 0,1,2] [--staleness 6] [--at 7] [--updates 8] [--json]

For each seed a run of the demo samples its rollouts up to `--staleness` updates ahead, at a high learning rate, and
evaluates held-out prompts at temperature 1 before the step `--at`. The comparison predicts from that step's rollouts
how an update under each correction changes the reward on them. Two things are then done with each correction:

* one update: the model after exactly the update that was predicted answers the same prompts with `--samples` other
  samples each; reported is the change of the reward against the run's own correction, with its error by prompt.
* training: the run continues from the checkpoint before the step for `--updates` updates, with the same staleness, and
  is evaluated after every second one; reported is the mean of these rewards. `--updates 0` leaves it out.

Reported are also the rank correlations (Spearman) with the predictions.

No correction is trained as token_truncate with bounds that are 1 to nine digits, because stale rollouts need weights.
A prediction is about one step and a first-order change; training is many steps. Engines restart at the checkpoint, so
in training staleness grows from 0 to its bound in the first updates.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from harness.results import Row, argument_parser, report

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = ["correction.low=0.8", "correction.high=1.25"]
CORRECTIONS = {
    "off": ["correction.mode=token_truncate", "correction.low=0.999999999", "correction.high=1.000000001"],
    **{mode: [f"correction.mode={mode}", *BOUNDS] for mode in ("token_truncate", "token_mask", "sequence_mask")},
}
"""Settings of training with each correction."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--staleness", type=int, default=6, help="rollout.max_staleness")
    parser.add_argument("--at", type=int, default=7, help="step that is compared")
    parser.add_argument("--updates", type=int, default=8, help="updates of training with each correction")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--momentum", type=float, default=0.9, help="β₁ of the optimizer")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts, with 8 samples each")
    parser.add_argument("--samples", type=int, default=128, help="samples per held-out prompt after one update")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.updates, args.prompts, args.samples = "0", 2, 8, 2
    rows: list[Row] = []
    correlations: dict[str, list[float]] = {}
    for seed in map(int, args.seeds.split(",")):
        with tempfile.TemporaryDirectory(prefix="lockstep-ranking-") as root:
            results = of_seed(Path(root), seed, args)
        names = list(CORRECTIONS)
        predicted = [results[name]["against_run"] for name in names]
        for kind in ("one_update", "trained"):
            if kind in results[names[0]]:
                correlation = spearman(predicted, [results[name][kind] for name in names])
                correlations.setdefault(kind, []).append(round(correlation, 2))
        rows += [{"seed": seed, "correction": name, **results[name]} for name in names]
        print(f"seed {seed}: rank correlations {correlations}, {json.dumps(results)}", file=sys.stderr, flush=True)
    report(
        "objective_ranking",
        rows,
        {f"rank_correlations_{kind}": values for kind, values in correlations.items()},
        as_json=args.json,
    )


def of_seed(root: Path, seed: int, args) -> dict[str, dict[str, float]]:
    """Return prediction and trained reward of each correction."""
    common = [
        "experiment=demo", f"seed={seed}", f"run_root={root}", f"optimizer.lr={args.lr}",
        f"optimizer.betas=[{args.momentum},0.95]",
        f"rollout.max_staleness={args.staleness}", "rollout.prompts_per_step=16", "rollout.samples_per_prompt=8",
        "eval.temperature=1", "eval.samples_per_prompt=8", f"eval.prompts={args.prompts}", "logger.print_rollouts=0",
        "correction.on_disagreement=warn",
    ]  # fmt: skip
    before = args.at - 1
    train(*common, "run_name=base", f"updates={args.at}", f"eval.every={before}", "checkpoint.every=1",
          "checkpoint.keep=99", *CORRECTIONS["token_truncate"])  # fmt: skip
    words = ["--step", args.at, "--corrections", ",".join(CORRECTIONS), "--models", root / "models", "--json"]
    compared = json.loads(command("compare-objectives", root / "base", *words))
    results = {}
    answers = {path.name.partition("-")[0]: answered(path, seed, args) for path in sorted((root / "models").iterdir())}
    for number, row in enumerate(compared["rows"][1:], start=1):
        name = row["name"].partition(" ")[2]
        estimate, paired = row["predicted"], row["against_run"]
        results[name] = {
            "predicted": estimate["mean"], "error": estimate["error"], "against_run": paired["mean"],
            "paired_error": paired["error"], "norm": row["norm"], "signal_to_noise": row["signal_to_noise"],
            "untrained": row["untrained"],
        }  # fmt: skip
        gains = answers[str(number)] - answers["0"]
        results[name] |= {"one_update": gains.mean(), "one_update_error": gains.std(ddof=1) / len(gains) ** 0.5}
    for number, name in enumerate(CORRECTIONS if args.updates else ()):
        run = root / f"c{number}"
        shutil.copytree(root / "base", run)
        for path in (run / "checkpoints").glob("step-*"):
            if path.name != f"step-{before}":
                shutil.rmtree(path)
        end = before + args.updates
        train(*common, f"run_name={run.name}", f"updates={end}", f"resume={run}/checkpoints/step-{before}",
              "resume_with_changes=true", "eval.every=2", "checkpoint.every=0", *CORRECTIONS[name])  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rewards = {line["step"]: line["eval/reward_mean"] for line in lines if line.get("eval/reward_mean") is not None}
        after = [reward for update, reward in rewards.items() if update > before]
        results[name] |= {"before": rewards[before], "trained": float(np.mean(after)), "last": rewards[end]}
        shutil.rmtree(run)
    return results


def answered(model: Path, seed: int, args) -> np.ndarray:
    """Return the mean reward of each held-out prompt under a model, at temperature 1."""
    output = model.with_suffix(".json")
    command(
        "evaluate", "experiment=demo", f"model.path={model}", f"eval.output={output}", f"eval.prompts={args.prompts}",
        f"eval.samples_per_prompt={args.samples}", "eval.temperature=1", f"seed={1000 + seed}",
    )  # fmt: skip
    (results,) = json.loads(output.read_text())["sets"]
    if failed := results["metrics"]["eval/failed_fraction"]:  # they count as 0
        sys.exit(f"{failed:.1%} of the answers of {model.name} failed, on a busy machine at their deadlines; repeat it")
    return np.array([np.mean(prompt["rewards"]) for prompt in results["prompts"]])


def train(*words: object) -> None:
    command("train", *words)


def command(name: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", name, *map(str, words)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"lockstep {name} {' '.join(map(str, words))} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of the ranks."""
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


if __name__ == "__main__":
    main()
