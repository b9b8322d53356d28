"""Draw reward and mismatch of one or more runs over their updates.

python scripts/plot.py                                   runs/latest -> runs/latest/curves.png
python scripts/plot.py runs/a runs/b --out compare.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

PANELS = (
    ("reward/mean", "mean reward", "linear"),
    ("rollout_correction/k3_kl", "k3 KL, engine against trainer [nats]", "log"),
)


def read(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        sys.exit(f"lockstep: {path} does not exist; name a run directory, for example runs/latest")
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw reward and mismatch of runs over their updates.")
    parser.add_argument("runs", type=Path, nargs="*", default=[Path("runs/latest")])
    parser.add_argument("--out", type=Path, help="PNG or SVG to write (default: curves.png in the first run)")
    arguments = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 3.4), constrained_layout=True)
    for run in arguments.runs:
        lines = read(run)
        for axis, (name, label, scale) in zip(axes, PANELS, strict=True):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            axis.plot(*zip(*points, strict=True), label=run.resolve().name, linewidth=1.6)
            axis.set(xlabel="update", ylabel=label, yscale=scale)
            axis.grid(alpha=0.25)
    axes[0].set_ylim(0, 1.02)
    if len(arguments.runs) > 1:
        axes[0].legend(frameon=False, fontsize=8)
    out = arguments.out or arguments.runs[0] / "curves.png"
    figure.savefig(out, dpi=140)
    print(out)


if __name__ == "__main__":
    main()
