"""Compare the gradients of objectives and corrections on one saved step of a run, before training with them.

    lockstep compare-objectives runs/latest --step 5 --with grpo,gspo,cispo      presets of `algorithm`
    lockstep compare-objectives runs/latest --step 5 --with my_loss.py:fn        a loss or an advantage of yours
    lockstep compare-objectives runs/latest --step 5 --corrections off,token_truncate,sequence_mask
    lockstep compare-objectives runs/latest --step 5 --with gspo --html objectives.html
    lockstep compare-objectives runs/latest --step 5 --with gspo --models stepped
    lockstep compare-objectives runs/latest --step 5 --with gspo --after 2 algorithm.minibatches=4

Computes, with the weights before the step and its saved rollouts: norm, pairwise cosines and signal to noise of the
gradients, the weight of every token in them, clipped tokens, and the change of the reward on held-out rollouts that an
update promises to first order. docs/objectives.md defines every number. Writes nothing but the page and, with --models,
the model after each update, for `lockstep evaluate`. Needs the checkpoint before the step: train with
checkpoint.every=1 and a large checkpoint.keep to compare at any step.
Experimental: it has not run on GPUs yet.
Exit status 0: success; 2: wrong arguments, damaged files, or an objective that this run cannot show.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("--step", type=int, required=True, help="update after the step")
    parser.add_argument("--with", dest="names", default="", metavar="NAMES", help="objectives, divided by commas")
    parser.add_argument("--corrections", default="", metavar="MODES", help="modes of the rollout correction, or bypass")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="optimizer steps of this batch made before")
    parser.add_argument("--heldout", type=Path, metavar="JSONL", help="saved rollouts whose mean reward is predicted")
    parser.add_argument("--models", type=Path, metavar="DIR", help="write the model after the update of each objective")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON and nothing else")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write a page")
    parser.add_argument("--trust-run", action="store_true", help="run the loss or advantage that its config.yaml names")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, of all objectives")
    arguments = parser.parse_intermixed_args()

    from lockstep.rollout.errors import LockstepError
    from lockstep.rollout.safe_text import print_error, safe_text

    try:
        from lockstep.lab.objectives.laboratory import Request, compare_objectives
        from lockstep.lab.objectives.objective_numbers import tables

        request = Request(
            run=arguments.run,
            step=arguments.step,
            names=[name for name in arguments.names.split(",") if name],
            corrections=[mode for mode in arguments.corrections.split(",") if mode],
            after=arguments.after,
            heldout=arguments.heldout,
            models=arguments.models,
            overrides=arguments.overrides,
            trusts_run=arguments.trust_run,
        )
        with redirect_stdout(sys.stderr):
            comparison = compare_objectives(request)
        if arguments.html is not None:
            from lockstep.lab.objectives.page import write_objectives_page

            write_objectives_page(arguments.html, comparison)
    except (LockstepError, OSError) as error:
        print_error(error)
        return 2
    print(json.dumps(comparison.to_json()) if arguments.json else safe_text(tables(comparison)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
