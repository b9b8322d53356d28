"""Do engine and trainer agree on the log-probabilities of a model, and if not, why?

    python scripts/diagnose.py                                      the demo model
    python scripts/diagnose.py model.path=... data.path=...         any model, with the settings of training
    python scripts/diagnose.py --html view.html                     every token to look at, in one page
    python scripts/diagnose.py --rollouts runs/latest               rollouts that a run has saved; needs no engine
    python scripts/diagnose.py --break retokenise                   what a broken pipeline looks like
    python scripts/diagnose.py --json                               for programs; exit status 0: ok, 1: not

What the numbers mean: docs/diagnosis.md. Settings: trainer/config/schema.py, as for scripts/train.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainer.cli import launch

VARIANT_NAMES = ("retokenise", "missing_final", "shift", "dropout", "stale_weights")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this script, and the rest for Hydra."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON and nothing else")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write the token view to this file")
    parser.add_argument("--rollouts", type=Path, metavar="PATH", help="saved rollouts (JSONL), or a run directory")
    parser.add_argument("--break", dest="variant", choices=VARIANT_NAMES, help="break the pipeline in this way")
    return parser.parse_known_args(arguments)


def main() -> None:
    flags, overrides = parse(sys.argv[1:])
    exit_status: list[int] = []

    def with_config(config) -> None:
        from trainer.diagnosis.variants import Variant
        from trainer.tools.diagnose import Options, run  # torch and vLLM load only after the settings are right

        options = Options(
            as_json=flags.json,
            html=flags.html,
            rollouts=rollouts,
            variant=Variant(flags.variant) if flags.variant else None,
        )
        exit_status.append(0 if run(config, options).is_ok else 1)

    rollouts = None
    if flags.rollouts is not None:
        from rollout.errors import ConfigError
        from trainer.diagnosis.saved import find_rollouts, run_overrides

        try:
            rollouts = find_rollouts(flags.rollouts)
            overrides = [*run_overrides(rollouts, overrides), *overrides]
        except ConfigError as error:
            print(f"lockstep: {error}", file=sys.stderr)
            sys.exit(2)
    sys.argv = [sys.argv[0], *overrides]
    launch(with_config, needs_data=rollouts is None)
    sys.exit(exit_status[0] if exit_status else 0)


if __name__ == "__main__":
    main()
