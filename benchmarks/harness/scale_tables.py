"""Tables of the scale benchmark: a row per point, exponents of a sweep, and the outlook to many GPUs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.results import fitted_exponent
from lockstep.trainer.collect.several_ranks import POLL_S

GPUS, GPU_TOKENS, GPU_STEP_S = (8, 64, 256, 1024), 65536, 120.0
"""Outlook: numbers of GPUs, tokens that each samples in a step, and the time of the step [s]."""
NETWORK_MB_S = 3125.0
"""25 Gb/s."""


def summary(costs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return a row of the table; times of several ranks are those of the busiest one, unless the name says other.

    costs: of each rank (`scale.drive`).
    """
    main = costs[0]
    requests, tokens = sum(int(cost["requests"]) for cost in costs), int(main["trained"])
    total_s = sum(cost["driving_s"] for cost in costs)
    busiest_s = max(cost["driving_s"] for cost in costs)
    return {
        "ranks": len(costs),
        "engines": int(main["engines"]),
        "rollouts": int(main["rollouts"]),
        "requests": requests,
        "lost, sent again": f"{sum(int(cost['lost']) for cost in costs)}, {sum(int(cost['resent']) for cost in costs)}",
        "tokens": tokens,
        "virtual s": main["virtual_s"],
        "meetings": int(main["meetings"]),
        "CPU s": busiest_s,
        "median": statistics.median(cost["driving_s"] for cost in costs),
        "of it episodes": max(cost["episodes_s"] for cost in costs),
        "tokens/CPU s": tokens / busiest_s,
        "with rows": tokens / max(cost["driving_s"] + cost["sharing_s"] for cost in costs),
        "µs/token": 1e6 * total_s / tokens,
        "ms/request": 1e3 * total_s / requests,
        "of it the pool": 1e-3 * main["pool_us"],
        "records, MB": main["record_bytes"] / 1e6,
        "prepared calls, CPU s": max(cost["preparing_s"] for cost in costs),
        "rows, CPU s": main["sharing_s"],
        "of it the plan": main["planning_s"],
        "rows, median": statistics.median(cost["sharing_s"] for cost in costs),
        "over all tokens, CPU s": statistics.median(cost["computing_s"] for cost in costs),
        "end of the step, CPU s": main["ending_s"],
        "numbers, MB": max(cost["number_bytes"] for cost in costs) / 1e6,
        "rows, MB": max(cost["row_bytes"] for cost in costs) / 1e6,
    }


def of_step(several: Sequence[Mapping[str, Any]], column: str, gpus: int) -> float:
    """Return a column for a step of many GPUs, by a straight line through its value per token of a rank.

    several: rows of the sweep over ranks. A line that falls is taken as a constant: nothing gets cheaper by more ranks.
    """
    own = [row[column] * row["ranks"] / row["tokens"] for row in several]
    ranks = [row["ranks"] for row in several]
    slope = max(statistics.linear_regression(ranks, own).slope, 0.0)
    return GPU_TOKENS * max(statistics.mean(own) + slope * (gpus - statistics.mean(ranks)), 0.0)


def outlook(measured: Mapping[str, Sequence[Mapping[str, Any]]], unit: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return what a step costs outside the GPUs, from the numbers per token, byte and meeting.

    Each GPU is a rank that drives its own engine, and samples `GPU_TOKENS` in a step of `GPU_STEP_S` seconds. What the
    ranks spend on rows is a straight line over their number: a cost per token of the rank, and one per token of all.
    """
    several = [row for row in measured["ranks"] if row["ranks"] > 1]
    driver_us = measured["http"][-1]["µs/token"]
    # With any number of ranks: it has three neighbors at most.
    meeting_s = 1e-3 * max(row["busiest rank"] for row in measured["meetings"])

    rows = []
    for gpus in GPUS:
        tokens = gpus * GPU_TOKENS
        numbers_mb, rows_mb = of_step(several, "numbers, MB", gpus), of_step(several, "rows, MB", gpus)
        parts = {
            "rows, CPU s of rank 0": of_step(several, "rows, CPU s", gpus),
            "numbers through a tree at 25 Gb/s, s": numbers_mb * math.ceil(math.log2(gpus)) / NETWORK_MB_S,
            "rows from rank 0 at 25 Gb/s, s": rows_mb * (gpus - 1) / NETWORK_MB_S,
            "over all tokens, CPU s of each rank": of_step(several, "over all tokens, CPU s", gpus),
            "checks and files, CPU s of rank 0": of_step(several, "end of the step, CPU s", gpus),
        }
        rows.append(
            {
                "GPUs": gpus,
                "driving, CPU s per rank": 1e-6 * driver_us * GPU_TOKENS,
                "meetings, CPU s of the busiest rank": meeting_s * GPU_STEP_S / POLL_S,
                "records to rank 0, GB": 1e-9 * tokens * unit["record_bytes_per_token"],
                "records, CPU s of rank 0": 1e-6 * tokens * unit["unpacking_us_per_token"],
                "prepared calls, CPU s per rank": of_step(several, "prepared calls, CPU s", gpus),
                "numbers to each rank, MB": numbers_mb,
                "rows to each rank, MB": rows_mb,
                "rows, CPU s of others": of_step(several, "rows, median", gpus),
                **parts,
                "share of the step in which GPUs wait": sum(parts.values()) / GPU_STEP_S,
            }
        )
    return rows


def exponents(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the exponents and ratios of a sweep."""
    match name:
        case "engines":
            sizes = [row["engines"] for row in rows]
            return {"cpu_by_engines": fitted_exponent(sizes, [row["CPU s"] for row in rows])}
        case "drivers":
            rates = {row["ranks"]: row["tokens/CPU s"] for row in rows}
            whole = {row["ranks"]: row["with rows"] for row in rows}
            return {
                f"rate_of_{count}_drivers{name}": of[count] / of[1]
                for name, of in (("", rates), ("_with_rows", whole))
                for count in of
                if count > 1
            }
        case "ranks":
            shared = [row for row in rows if row["ranks"] > 1]  # a rank alone meets none and sends nothing
            sizes = [row["ranks"] for row in shared]

            def exponent(column: str, *, is_per_token: bool = False) -> float:
                """is_per_token: of the value over the tokens of a rank, which are not quite the same in all points."""
                own = [row["tokens"] / row["ranks"] if is_per_token else 1.0 for row in shared]
                return fitted_exponent(sizes, [row[column] / tokens for row, tokens in zip(shared, own, strict=True)])

            return {
                "cpu_by_ranks": exponent("CPU s", is_per_token=True),
                "cpu_median_by_ranks": exponent("median", is_per_token=True),
                "episodes_by_ranks": exponent("of it episodes", is_per_token=True),
                "record_bytes_by_ranks": exponent("records, MB"),
                "number_bytes_by_ranks": exponent("numbers, MB", is_per_token=True),
                "row_bytes_by_ranks": exponent("rows, MB", is_per_token=True),
                "prepared_calls_by_ranks": exponent("prepared calls, CPU s", is_per_token=True),
                "row_cpu_rank_0_by_ranks": exponent("rows, CPU s", is_per_token=True),
                "row_cpu_median_by_ranks": exponent("rows, median", is_per_token=True),
                "plan_by_ranks": exponent("of it the plan", is_per_token=True),
                "end_of_step_by_ranks": exponent("end of the step, CPU s", is_per_token=True),
                "over_all_tokens_by_ranks": exponent("over all tokens, CPU s", is_per_token=True),
            }
        case "apart":
            several = [row for row in rows if row["ranks"] > 1]
            sizes, seconds = ([row[name] for row in several] for name in ("ranks", "of it episodes"))
            return {"episodes_by_processes_apart": fitted_exponent(sizes, seconds)}
        case "meetings":
            sizes, cpu_ms, busiest_ms = (
                [row[name] for row in rows] for name in ("ranks", "ms/meeting", "busiest rank")
            )
            return {
                "meeting_by_ranks": fitted_exponent(sizes, cpu_ms),
                "meeting_of_busiest_rank_by_ranks": fitted_exponent(sizes, busiest_ms),
            }
        case "http":
            local, remote = (row["ms/request"] for row in rows)
            return {"http_ms_per_request": remote - local}
    return {}
