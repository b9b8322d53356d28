"""Examine an environment with its data and rewards before it trains anything.

    lockstep check-environment calculator                                        the demo
    lockstep check-environment my_env.py:Guess --data numbers.jsonl \\
        'reward.functions=[my_env.py:found]' model=calculator                             an environment of yours
    lockstep check-environment tools --data questions.jsonl model.path=... \\
        'environment.settings.files=[my_tools.py:search]' 'reward.functions=[exact_match]'
    lockstep check-environment ... --json                                        for programs

Scripted answers and episodes of the model, on the CPU: contract of the environment, tools, deadlines, the answer in the
prompt, the reward of empty, echoed, repeated and right answers, the columns that it reads, the same episode twice,
tokens of the training rows, spread within groups, cost. The page is docs/environments.md. Further words are settings,
as for lockstep train.
Exit status 0: all checks passed; 1: a check failed; 2: the environment or a setting cannot be used.
Experimental: each version adds checks, so that an environment which passes today may fail tomorrow.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from functools import partial

from lockstep.lab.environments.supervisor import DUMP_SIGNAL, supervise
from lockstep.trainer.command_line import settings_files
from lockstep.trainer.compose import CONFIG_DIR


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into the options of this script and the overrides for Hydra."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("environment", help="name of an environment, path/to/file.py:ClassName, or a settings file")
    parser.add_argument("--data", metavar="PATH", help="data rows; a demo task has its own")
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="data rows to examine (8)")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="episodes of the model per row (4)")
    parser.add_argument(
        "--deadline", type=float, default=10.0, metavar="S", help="limit of one call of your code (10 s)"
    )
    parser.add_argument(
        "--reference", metavar="COLUMN", help="column with the reference answer; default: found by name"
    )
    parser.add_argument(
        "--form", action="append", default=[], metavar="TEXT", help="text of a right answer, with {answer}; repeatable"
    )
    parser.add_argument(
        "--player", metavar="FILE:NAME", help="function (messages, row) that returns the best next turn"
    )
    parser.add_argument(
        "--reads", action="append", default=[], metavar="COLUMN", help="column that rewards may read, too"
    )
    parser.add_argument("--accept", action="append", default=[], metavar="CHECK", help="name of a check that may fail")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON and nothing else")
    parser.add_argument("--journal", type=int, help=argparse.SUPPRESS)  # descriptor; set for the process that examines
    return parser.parse_known_args(arguments)


def overrides_of(flags: argparse.Namespace) -> list[str]:
    """Return the settings that the options stand for."""
    name = flags.environment
    has = {group: (CONFIG_DIR / group / f"{name}.yaml").is_file() for group in ("environment", "data", "model")}
    words = [f"environment={name}" if has["environment"] else f"environment.name={name}"]
    if settings_files([name]):
        words = [name]
    if flags.data is not None:
        return [*words, f"data.path={flags.data}", "data.heldout_path=null"]
    is_demo = has["data"] and has["model"]
    return [*words, f"data={name}", f"model={name}", "reward=calculator"] if is_demo else words


def main() -> None:
    flags, settings = parse(sys.argv[1:])
    if flags.journal is None:
        user_file = flags.environment.rpartition(":")[0] or None
        command = [sys.executable, __file__, *sys.argv[1:]]
        sys.exit(supervise(command, sys.argv[1:], as_json=flags.json, user_file=user_file))

    from lockstep.rollout.system.orphan_guard import exit_when_orphaned
    from lockstep.trainer.cli import launch

    exit_when_orphaned()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    sys.argv = [sys.argv[0], *overrides_of(flags), *settings]
    launch(partial(examine_with, flags))
    os._exit(0)  # threads of tools that hang would keep the process


def examine_with(flags: argparse.Namespace, config) -> None:
    from lockstep.lab.environments.journal import (
        Journal,
    )  # after the settings are checked: torch loads slowly
    from lockstep.lab.environments.kit import findings, record
    from lockstep.lab.environments.subject import Options

    options = Options(
        rows=flags.rows,
        samples=flags.samples,
        deadline_s=flags.deadline,
        reference=flags.reference,
        forms=tuple(flags.form),
        player=flags.player,
        reads=tuple(flags.reads),
    )
    with os.fdopen(flags.journal, "w") as file:
        journal = Journal(file)
        record(findings(config, options, journal), journal, accepted=flags.accept)


if __name__ == "__main__":
    main()
