"""Time of a call in an episode's sandbox, against the same program as a bare process.

    python benchmarks/sandbox_calls.py [--repeats 40]

The sides take turns; times are medians. Needs a system with namespaces. Main numbers: `python_ratio` and `shell_ratio`,
a call over a bare process of the same interpreter, and `opening_ms`, which an episode pays with its first call.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from contextlib import closing

from harness.results import argument_parser, interleaved, report

from lockstep.rollout.sandbox.execution import Language, Limits
from lockstep.rollout.sandbox.program_session import Session, tool_call
from lockstep.rollout.sandbox.sandbox import local_enclosure, run_python


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    repeats = 2 if args.quick else args.repeats
    interpreter = os.path.realpath(sys.executable)
    enclosure = local_enclosure(Limits(), unsafe=False, setting=None)
    with closing(Session(enclosure)) as session:

        def call(language: Language, text: str) -> None:
            session.run(tool_call(enclosure, language, text), timeout_s=20.0, output_bytes=4096)

        def bare(*command: str) -> None:
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)

        sides = {
            "python, bare": lambda: bare(interpreter, "-c", "print(6 * 7)"),
            "python, in a sandbox": lambda: call(Language.PYTHON, "print(6 * 7)"),
            "shell, bare": lambda: bare("/bin/sh", "-c", "echo 42"),
            "shell, in a sandbox": lambda: call(Language.SHELL, "echo 42"),
            "opening and closing": lambda: Session(local_enclosure(Limits(), unsafe=False, setting=None)).close(),
            "run_python, alone": lambda: run_python("print(6 * 7)"),
        }
        interleaved(sides, repeats=1)  # files are read for the first time
        times = {
            name: statistics.median(seconds) * 1e3 for name, seconds in interleaved(sides, repeats=repeats).items()
        }
    numbers = {
        "python_ratio": times["python, in a sandbox"] / times["python, bare"],
        "shell_ratio": times["shell, in a sandbox"] / times["shell, bare"],
        "opening_ms": times["opening and closing"],
    }
    report("sandbox_calls", [{"": name, "ms": value} for name, value in times.items()], numbers, as_json=args.json)


if __name__ == "__main__":
    main()
