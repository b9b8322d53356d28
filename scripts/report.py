"""Write an HTML page about a run: curves, mismatch, time, alarms, the worst and the best rollouts, settings.

    lockstep report                            runs/latest -> runs/latest/report.html
    lockstep report runs/mine --out mine.html
    lockstep report runs/a runs/b              a page for each run; to compare runs: lockstep plot, lockstep watch

The page is one file without scripts or network access, to send or to read on a phone. It also works during a run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "runs", type=Path, nargs="*", default=[Path("runs/latest")], help="run directories (default: runs/latest)"
    )
    parser.add_argument("--out", type=Path, help="file to write for one run (default: report.html in its directory)")
    arguments = parser.parse_args()

    from lockstep.lab.pages.run_report import write_report
    from lockstep.lab.pages.saved_run import SavedRun
    from lockstep.rollout.errors import ConfigError, LockstepError
    from lockstep.rollout.safe_text import print_error
    from lockstep.rollout.system.plain_files import behind_link, own_output

    several = shlex.join(map(str, arguments.runs)) if len(arguments.runs) > 1 else ""
    if several and arguments.out:
        print_error(
            f"--out names one file for {len(arguments.runs)} runs; leave it out, or type lockstep plot {several}"
        )
        return 2
    for path in arguments.runs:
        try:
            directory = behind_link(path)
            out = arguments.out or own_output(directory / "report.html")
            run = SavedRun.read(directory)
            write_report(run, out)
        except (LockstepError, OSError) as error:
            print_error(error)
            return 2 if isinstance(error, ConfigError) else 1
        for sentence in run.passed_over:
            print_error(f"{sentence}; the page has older rollouts")
        print(out)
    if several:
        print(f"one page for each run; to compare them: lockstep plot {several}, or lockstep watch {several}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
