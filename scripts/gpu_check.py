"""Check every path that needs a GPU, on this machine: about 30 minutes on two GPUs, without network.

    lockstep gpu-check                       all checks; in a checkout make gpu-check
    lockstep gpu-check --quick               the first ones, in about five minutes
    lockstep gpu-check --only transfer loop  these
    lockstep gpu-check --rehearse            on a machine without a GPU: the program itself, in small sizes

Each check runs in a process of its own with a time limit. The table, `gpu_check.json`, `index.html` and a folder with
the log of each check are in the run directory; a zip file beside it has what a report needs, without secrets. Exit
status: 0 if checks passed and none failed, 1 if one failed or none passed, 2 if nothing can be checked here.
docs/gpu.md describes the checks.
Experimental: it has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lockstep.scripts.gpu_checks import CHECKS, Check
from lockstep.scripts.gpu_checks.one import RESULT
from lockstep.scripts.gpu_checks.parcel import pack, without_secrets

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
COLORS = {PASSED: "green", FAILED: "red", SKIPPED: "yellow"}
SHOWN_LINES = 15
"""Last lines of the log of a check that died, in its reason."""
BADGES = {PASSED: "ok", FAILED: "critical", SKIPPED: "warning"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome of one check."""

    check: Check
    verdict: str
    """passed, failed or skipped."""
    reason: str = ""
    """Reason of a skipped check, or of one that failed without measurements."""
    measured: Sequence[dict[str, Any]] = ()
    """Fields of `Measured`."""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Return the measurements in words, or the reason."""
        return [self.reason, *map(_in_words, self.measured)] if self.reason else [*map(_in_words, self.measured)]


def _in_words(measured: dict[str, Any]) -> str:
    value = measured["value"]
    number = f"{value:.4g}" if isinstance(value, float) else str(value)
    expected = f" (expected {measured['expected']})" if measured["expected"] else ""
    return f"{'' if measured['is_met'] else 'NOT MET: '}{measured['name']}: {number}{expected}"


def reason_to_skip(check: Check, *, rehearses: bool, num_gpus: int) -> str | None:
    """Return why this machine cannot run the check; None if it can."""
    if rehearses and check.needs_vnni and not has_vnni():
        return "needs a GPU, or a CPU with VNNI"
    if rehearses:
        return None if check.rehearses else "needs a GPU"
    return None if num_gpus >= check.num_gpus else f"needs {check.num_gpus} GPUs"


def has_vnni() -> bool:
    """Return True if the CPU has instructions for int8 products."""
    return "vnni" in Path("/proc/cpuinfo").read_text()


def run_check(check: Check, directory: Path, *, rehearses: bool) -> Result:
    """Run a check in a process of its own and end it at its time limit."""
    folder = directory / check.name
    folder.mkdir(parents=True)
    command = [os.environ.get("PYTHON_EXEC", sys.executable), "-m", "lockstep.scripts.gpu_checks.one"]
    command += [check.module, check.name, str(folder), *(["--rehearse"] if rehearses else [])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"} | (
        {"OMP_NUM_THREADS": "1"} if rehearses else {}
    )
    start = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout=check.limit_s)
            reason = f"ended with status {process.returncode}; see {folder / 'log.txt'}"
        except subprocess.TimeoutExpired:
            reason = f"timed out after {check.limit_s:g} s; see {folder / 'log.txt'}"
        finally:
            _end(process)
    if process.returncode:
        reason += "\n" + "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-SHOWN_LINES:])
    return _result(check, folder / RESULT, reason, time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, engines and ranks included, after each wrote the stacks of its threads."""
    import psutil

    if process.poll() is None:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER answers it with stacks
        _, alive = psutil.wait_procs(family, timeout=5)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(alive, timeout=30)
        process.wait()


def _result(check: Check, path: Path, reason: str, seconds: float) -> Result:
    """Judge what a check has written. reason: of its failure, if it has written nothing."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"error": reason}
    measurements = report.get("measured", [])
    error = report.get("error") or ("" if measurements else "measured nothing")
    is_passed = not error and all(one["is_met"] for one in measurements)
    return Result(
        check=check, verdict=PASSED if is_passed else FAILED, reason=error, measured=measurements, seconds=seconds
    )


def run_checks(
    checks: Sequence[Check], directory: Path, *, rehearses: bool, num_gpus: int, report: Callable[[Result], None]
) -> list[Result]:
    """Run or skip each check, one after another. report: called with each result."""
    results = []
    for check in checks:
        reason = reason_to_skip(check, rehearses=rehearses, num_gpus=num_gpus)
        if reason is None:
            results.append(run_check(check, directory, rehearses=rehearses))
        else:
            results.append(Result(check=check, verdict=SKIPPED, reason=reason))
        report(results[-1])
    return results


def counts(results: Sequence[Result]) -> str:
    numbers = {verdict: sum(result.verdict == verdict for result in results) for verdict in COLORS}
    return ", ".join(f"{number} {verdict}" for verdict, number in numbers.items())


def status(results: Sequence[Result]) -> int:
    """Return the exit status: 0 if at least one check passed and none failed, else 1."""
    verdicts = [result.verdict for result in results]
    return int(FAILED in verdicts or PASSED not in verdicts)


def machine() -> dict[str, str]:
    """Return versions, GPUs and driver, by name."""
    from lockstep.trainer.run.provenance import provenance

    facts = provenance()
    labels = {name: facts["packages"][name] for name in facts["packages"]}
    labels |= {"python": facts["python"], "platform": facts["platform"], "devices": ", ".join(facts["devices"])}
    labels |= {"commit": str(facts["code"]["commit"]), "CUDA of torch": str(torch.version.cuda)}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        labels["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return labels


def markdown(results: Sequence[Result], facts: dict[str, str], title: str) -> str:
    """Return what to paste into an issue."""
    rows = [f"| {result.check.name} | {result.verdict} | {_cell('<br>'.join(result.lines()))} |" for result in results]
    versions = ", ".join(f"{name} {value}" for name, value in facts.items())
    return "\n".join(
        [f"{title}: {counts(results)}", "", versions, "", "| check | verdict | measured |", "|---|---|---|", *rows]
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


def write(results: Sequence[Result], facts: dict[str, str], directory: Path, title: str) -> None:
    """Write the results as JSON and as a page."""
    from lockstep.lab.pages.render import render, write_page

    entries = [asdict(result) for result in results]
    (directory / "gpu_check.json").write_text(json.dumps({"machine": facts, "results": entries}, indent=1))
    page = render(
        "gpu_check.html.jinja", title=title, counts=counts(results), results=results, badges=BADGES, facts=facts
    )
    write_page(directory / "index.html", page)


def table(results: Sequence[Result]) -> Table:
    grid = Table("check", "verdict", "expected", "measured", "s", show_lines=True)
    for result in results:
        verdict = f"[{COLORS[result.verdict]}]{result.verdict}"
        lines = "\n".join(result.lines()).replace("[", r"\[")
        grid.add_row(result.check.name, verdict, result.check.expected, lines, f"{result.seconds:.0f}")
    return grid


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    parser = argparse.ArgumentParser(
        prog="lockstep gpu-check", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="run the small CPU form of each check that has one")
    parser.add_argument("--quick", action="store_true", help="only the checks of the first five minutes")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in checks], metavar="NAME", default=[])
    parser.add_argument("--out", type=Path, help="run directory, new or empty (default: runs/gpu-check-<time>)")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    if options.rehearse and num_gpus:
        print("lockstep: --rehearse is for machines without a GPU; run it without this option here", file=sys.stderr)
        return 2
    if not options.rehearse and not num_gpus:
        print("lockstep: this machine has no GPU that torch sees, so nothing can be checked", file=sys.stderr)
        return 2
    directory = (options.out or Path("runs") / time.strftime("gpu-check-%Y%m%d-%H%M%S")).resolve()
    if directory.exists() and any(directory.iterdir()):
        print(f"lockstep: --out={directory} has files; name a new or an empty directory", file=sys.stderr)
        return 2
    directory.mkdir(parents=True, exist_ok=True)
    console = Console()
    selection = [check for check in checks if check.name in options.only or not options.only]
    selection = [check for check in selection if check.is_quick or not options.quick]
    title = f"GPU check{', quick form' * options.quick}{', rehearsed on a CPU' * options.rehearse}"

    def say(result: Result) -> None:
        verdict = f"[{COLORS[result.verdict]}]{result.verdict}[/]"
        console.print(f"{result.check.name:<12} {verdict}, {result.seconds:.0f} s", highlight=False)

    results = run_checks(selection, directory, rehearses=options.rehearse, num_gpus=num_gpus, report=say)
    facts = machine()
    write(results, facts, directory, title)
    console.print(table(results))
    report = without_secrets()(markdown(results, facts, title))
    (directory / "report.md").write_text(report, encoding="utf-8")
    console.print(f"{counts(results)}; {directory}/index.html, gpu_check.json", soft_wrap=True)
    print(f"\nTo paste into an issue:\n\n{report}\n\nTo attach to it: {pack(directory)}")
    return status(results)


if __name__ == "__main__":
    sys.exit(main())
