"""Diagnose how well engine and trainer agree on the logprobs of a model, and name the cause if they do not.

    lockstep diagnose experiment=demo                        the demo model
    lockstep diagnose model.path=... data.path=...           any model, with the settings of training
    lockstep diagnose experiment=demo --html view.html       every token in one page
    lockstep diagnose --rollouts runs/latest                 rollouts that a run saved; needs no engine
    lockstep diagnose --ids dump.jsonl                       token ids with logprobs that another trainer wrote
    lockstep diagnose --ids dump.jsonl model.path=...        the same, scored again with these weights
    lockstep diagnose experiment=demo --break retokenise     a deliberately broken pipeline
    lockstep diagnose experiment=demo --locate               the operator and layer at which engine and trainer part
    lockstep diagnose experiment=demo --json                 for programs; exit status 0: ok, 1: not ok

The numbers are explained in docs/diagnosis.md, those of --ids in docs/kl.md. Settings: trainer/config/schema.py, as for
lockstep train.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

from lockstep.lab.diagnosis.causes import VARIANTS, Cause, Severity
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.safe_text import print_error
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.cli import launch


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into the flags of this script and the overrides for Hydra."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON and nothing else")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write the token view to this file")
    parser.add_argument("--rollouts", type=Path, metavar="PATH", help="saved rollouts (JSONL), or a run directory")
    parser.add_argument("--ids", type=Path, metavar="PATH", help="token ids with logprobs of another trainer")
    variants = [variant.value for variant in VARIANTS]
    parser.add_argument("--break", dest="variant", choices=variants, help="break the pipeline in this way")
    parser.add_argument("--locate", action="store_true", help="name the operator at which engine and trainer part")
    flags, overrides = parser.parse_known_args(arguments)
    if flags.locate and (flags.rollouts is not None or flags.variant is not None):
        parser.error("--locate samples a row of its own from an unbroken pipeline; leave out --rollouts and --break")
    if flags.ids is not None and (flags.rollouts or flags.variant or flags.html or flags.locate):
        parser.error("--ids reads rows of another trainer; leave out --rollouts, --break, --html and --locate")
    return flags, overrides


def main() -> None:
    flags, overrides = parse(sys.argv[1:])
    exit_status: list[int] = []

    if flags.ids is not None and not overrides:
        from lockstep.lab.dumps.examine import examine

        try:
            severity = examine(flags.ids, as_json=flags.json)
        except (ConfigError, DataError) as error:
            print_error(error)
            sys.exit(2)
        sys.exit(0 if severity is Severity.OK else 1)

    def with_config(config) -> None:
        # After the settings are checked, because torch and vLLM load slowly.
        if flags.ids is not None:
            from lockstep.lab.diagnose import open_scorer
            from lockstep.lab.dumps.examine import examine
            from lockstep.lab.dumps.own_scores import score

            load = partial(open_scorer, config, None)
            model, temperature = str(config.model.path), config.rollout.temperature
            own_scores = partial(score, load=load, model=model, temperature=temperature)
            severity = examine(flags.ids, own_scores, as_json=flags.json)
            exit_status.append(0 if severity is Severity.OK else 1)
            return
        from lockstep.lab.diagnose import run, run_location

        if flags.locate:
            from lockstep.lab.locate.setup import Subject

            subject = Subject(**{field.name: getattr(config, field.name) for field in fields(Subject)})
            location = run_location(subject, as_json=flags.json, html=flags.html)
            exit_status.append(0 if location.verdict == "ok" else 1)
            return
        variant = Cause(flags.variant) if flags.variant else None
        diagnosis = run(config, as_json=flags.json, html=flags.html, rollouts=rollouts, variant=variant)
        exit_status.append(0 if diagnosis.finding.severity is Severity.OK else 1)

    rollouts = None
    if flags.rollouts is not None:
        from lockstep.lab.diagnosis.saved import find_rollouts, run_overrides
        from lockstep.trainer.settings_file import with_file

        try:
            rollouts = find_rollouts(flags.rollouts)
            overrides = [*run_overrides(rollouts, with_file(overrides)), *overrides]
        except ConfigError as error:
            print_error(error)
            sys.exit(2)
    sys.argv = [sys.argv[0], *overrides]
    needs_data = rollouts is None and flags.ids is None and not flags.locate
    launch(with_config, check=partial(validate, needs_data=needs_data, scores=False))
    sys.exit(exit_status[0] if exit_status else 0)


if __name__ == "__main__":
    main()
