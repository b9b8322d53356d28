"""Draw reward and mismatch of one or more runs over their updates.

    python scripts/plot.py                                   runs/latest -> runs/latest/curves.png
    python scripts/plot.py runs/a runs/b --out compare.png
    python scripts/plot.py runs/a --metrics objective/score objective/kl     other metrics, one panel each

Writes PNG, or SVG if `--out` ends with it.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any

MISMATCH = (
    ("rollout_correction/logp_diff_abs_max", "largest |Δ logp| of a token"),
    ("rollout_correction/kl", "|kl|"),
)
"""Mismatch metrics with labels. Below the dashed line training is on policy, above the solid one it breaks."""
EXPECTED_KL, CRITICAL_KL = 0.01, 0.1


def read(run: Path) -> list[dict[str, float]]:
    from lockstep.rollout.errors import LockstepError
    from lockstep.rollout.safe_text import print_error
    from lockstep.trainer.observe.metrics_log import read_metrics

    try:
        return read_metrics(run / "metrics.jsonl")
    except LockstepError as error:
        print_error(error)
        sys.exit(1)


def series(lines: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="*", default=[Path("runs/latest")], help="run directories (default: runs/latest)"
    )
    parser.add_argument("--out", type=Path, help="PNG or SVG to write (default: curves.png in the first run)")
    parser.add_argument("--metrics", nargs="+", help="names of metrics to draw instead, one panel each")
    arguments = parser.parse_args()

    import matplotlib

    from lockstep.rollout.system.plain_files import behind_link

    runs = [behind_link(run) for run in arguments.runs]
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False  # names of runs and metrics are text
    from matplotlib import pyplot

    if arguments.metrics:
        figure, panels = pyplot.subplots(
            1, len(arguments.metrics), figsize=(3.4 * len(arguments.metrics), 2.8), squeeze=False, layout="constrained"
        )
        for panel, metric in zip(panels[0], arguments.metrics, strict=True):
            for run in runs:
                panel.plot(*series(read(run), metric), label=run.resolve().name, linewidth=1.4)
            panel.set(title=metric, xlabel="update")
            panel.grid(alpha=0.25)
        panels[0][0].legend(frameon=False)
        return save(figure, arguments.out, runs[0] / "metrics.png")

    figure, (reward, mismatch) = pyplot.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
    for run in runs:
        lines, name = read(run), run.resolve().name
        updates, values = series(lines, "reward/mean")
        (drawn,) = reward.plot(updates, values, label=name, linewidth=1.6)
        for (metric, label), style in zip(MISMATCH, ("-", ":"), strict=True):
            updates, values = series(lines, metric)
            mismatch.plot(
                updates,
                [abs(value) for value in values],
                style,
                color=drawn.get_color(),
                linewidth=1.4,
                label=label if len(runs) == 1 else f"{name}: {label}",
            )
    reward.set(xlabel="update", ylabel="mean reward", ylim=(0, 1.02))
    mismatch.axhline(EXPECTED_KL, color="0.5", linestyle="--", linewidth=1)
    mismatch.axhline(CRITICAL_KL, color="0.5", linewidth=1)
    mismatch.set(xlabel="update", ylabel="engine against trainer [nats]", yscale="log", ylim=(None, 1))
    mismatch.yaxis.set_major_formatter(lambda value, place: f"{value:g}")  # the default writes formulas
    for level, text in ((EXPECTED_KL, "on policy below"), (CRITICAL_KL, "critical above")):
        mismatch.annotate(text, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
    mismatch.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0, 0.68))
    for axis in (reward, mismatch):
        axis.grid(alpha=0.25)
    if len(runs) > 1:
        reward.legend(frameon=False, fontsize=8)
    return save(figure, arguments.out, runs[0] / "curves.png")


def save(figure: Any, out: Path | None, default: Path) -> int:
    """Write the picture and return the exit status."""
    from lockstep.rollout.safe_text import print_error
    from lockstep.rollout.system.plain_files import own_output, write_whole

    try:
        out = out or own_output(default)
        picture = io.BytesIO()
        figure.savefig(picture, dpi=140, format=out.suffix.removeprefix(".") or "png")
        write_whole(out, picture.getvalue())
    except (OSError, ValueError) as error:  # matplotlib's for an unknown format
        print_error(error)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
