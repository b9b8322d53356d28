"""Process around an examination: it prints the table, and ends an examination that hangs or dies, with a verdict.

Covered: code of the user that blocks (also in C, without giving up the interpreter), ends its process, or is killed.
The process group is killed after the limit of the call; the verdict names the call, and the line of code that ran.
Not covered: a process that the user's code starts in a session of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.lab.finding import Finding, Verdict, failure
from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.system.captured_output import OutputTail

START_LIMIT_S = 300.0
"""Time limit until the examination has read its settings and loaded the user's file."""
GRACE_S = 3.0
"""Time beyond the limit of a call in which the examination may end it itself."""
DUMP_S = 1.0
"""Time for the stacks of the process to be written."""
DUMP_SIGNAL = signal.SIGUSR1
START = "the settings and the file of the environment"
KEPT_BYTES = 2**20
KEPT_LINES = 5
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


@dataclass(slots=True)
class Table:
    """Findings so far. Printed as lines, or at the end as JSON."""

    as_json: bool
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        if not self.as_json:
            print(f"{finding.check:<40} {finding.verdict:<6}{safe_text(finding.measured)}".rstrip(), flush=True)

    def close(self, words: Sequence[str]) -> bool:
        """Print the sentences or the JSON. Returns False if a check fails."""
        failures = [finding for finding in self.findings if finding.verdict is Verdict.FAILS]
        if self.as_json:
            entries = [
                {"check": one.check, "verdict": one.verdict, "measured": one.measured, "sentence": one.sentence}
                for one in self.findings
            ]
            print(json.dumps({"command": list(words), "ok": not failures, "findings": entries}))
            return not failures
        print()
        for finding in self.findings:
            if finding.sentence:
                print(f"{finding.verdict}: {finding.check}: {safe_text(finding.sentence)}")
        print(f"{len(self.findings) - len(failures)} of {len(self.findings)} checks passed")
        return not failures


@dataclass(slots=True)
class Progress:
    """State of the examination as its journal tells it."""

    open: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Work that has begun and not ended: in words, and the time at which it is overdue."""
    has_begun: bool = False
    is_done: bool = False

    def read(self, entry: dict[str, Any], table: Table) -> None:
        if "begin" in entry:
            self.has_begun = True
            self.open[entry["begin"]] = entry["what"], time.monotonic() + entry["limit_s"] + GRACE_S
        elif "end" in entry:
            self.open.pop(entry["end"], None)
        elif "finding" in entry:
            fields = entry["finding"]
            table.add(Finding(**{**fields, "verdict": Verdict(fields["verdict"])}))
        self.is_done = self.is_done or "done" in entry

    @property
    def current(self) -> str:
        """The work that began last."""
        return next(reversed(self.open.values()))[0] if self.open else ("the examination" if self.has_begun else START)

    @property
    def overdue_at(self) -> float:
        return min((at for _, at in self.open.values()), default=float("inf"))


def supervise(command: Sequence[str], words: Sequence[str], *, as_json: bool, user_file: str | None) -> int:
    """Run an examination and print its findings. Returns the exit status: 0, 1 (a check fails) or 2 (not started).

    command: starts it; `--journal <descriptor>` is added. user_file: file of the environment, for the line that hangs.
    """
    table, progress = Table(as_json), Progress()
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*command, "--journal", str(write_end)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(write_end,),
        start_new_session=True,
    )
    os.close(write_end)
    tail = OutputTail(KEPT_BYTES).follow(process.stdout)
    try:
        is_overdue = _follow(read_end, progress, table)
        if is_overdue:
            table.add(_hang(process, progress, tail, user_file))
        else:
            _wait(process)
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = tail.text(wait_s=DUMP_S)
    if not progress.is_done and not is_overdue:
        if process.returncode == 2 or any(line.startswith("lockstep: ") for line in output.splitlines()):
            print(safe_text(_own_lines(output)), file=sys.stderr)
            return 2
        table.add(_crash(process.returncode, progress, output))
    return 0 if table.close(words) else 1


def _follow(read_end: int, progress: Progress, table: Table) -> bool:
    """Read the journal until it ends. Returns True if something is overdue."""
    start_by, rest = time.monotonic() + START_LIMIT_S, b""
    with selectors.DefaultSelector() as selector:
        selector.register(read_end, selectors.EVENT_READ)
        while True:
            until = progress.overdue_at if progress.has_begun else start_by
            if not selector.select(max(0.0, min(until - time.monotonic(), 3600.0))):
                if time.monotonic() >= until:
                    return True
                continue
            part = os.read(read_end, 1 << 16)
            if not part:
                return False
            *lines, rest = (rest + part).split(b"\n")
            for entry in _entries(lines):
                progress.read(entry, table)


def _entries(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield json.loads(line)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for an examination that has closed its journal; it may still end engines."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)


def _hang(process: subprocess.Popen[bytes], progress: Progress, tail: OutputTail, user_file: str | None) -> Finding:
    """Kill the examination; return the finding with the line of code that did not return."""
    tail.clear()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, DUMP_SIGNAL)
    time.sleep(DUMP_S)
    stacks = tail.text()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    where = _line_of(stacks, user_file)
    sentence = (
        f"{progress.current} did not return and blocked all episodes{where}; the process was killed. Use async code "
        "or a thread for what waits, with a limit of its own. Later checks were not made."
    )
    return failure("calls return in time", sentence, "killed")


def _line_of(stacks: str, user_file: str | None) -> str:
    """Return the innermost line of the user's file in the stacks of all threads; "" if it is in none."""
    if user_file is None:
        return ""
    for path, line, function in FRAME.findall(stacks):
        if path == str(Path(user_file).resolve()):
            return f" (line {line} of {Path(user_file).name}, in {function})"
    return ""


def _crash(status: int | None, progress: Progress, output: str) -> Finding:
    ending = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
    last = " | ".join(output.splitlines()[-KEPT_LINES:])
    sentence = f"the process ended with {ending} during {progress.current}. Later checks were not made."
    return failure("process survives", f"{sentence} Its last output: {last}" if last else sentence, ending)


def _own_lines(output: str) -> str:
    """Return the sentences of Lockstep in an output, or all of it if there are none."""
    lines = [line for line in output.splitlines() if line.startswith("lockstep: ")]
    return "\n".join(lines) or output
