"""Upload the model of a run to the Hugging Face hub, with a model card made of the run.

    lockstep publish runs/mine --repo me/my-model               the model that the run has left
    lockstep publish runs/mine --repo me/my-model --checkpoint 40
    lockstep publish runs/mine --repo me/my-adapter --adapter   the LoRA adapter without the merged weights
    lockstep publish runs/mine --repo me/my-model --out folder  write folder and card, upload nothing

Without `--out` the folder is `hub/` in the run. With HF_HUB_OFFLINE=1 it is written and not uploaded. docs/publish.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory, for example runs/latest")
    parser.add_argument("--repo", required=True, help="<user or organization>/<name> on the hub")
    parser.add_argument(
        "--private", action=argparse.BooleanOptionalAction, help="of a new repository (default: hub.private of the run)"
    )
    parser.add_argument("--checkpoint", type=int, metavar="N", help="publish the checkpoint of update N")
    parser.add_argument("--adapter", action="store_true", help="publish the LoRA adapter alone")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a new folder, upload nothing")
    arguments = parser.parse_args()

    from lockstep.rollout.errors import LockstepError
    from lockstep.rollout.safe_text import print_error
    from lockstep.trainer.run.hub import publish

    try:
        publish(
            arguments.run,
            arguments.repo,
            private=arguments.private,
            checkpoint=arguments.checkpoint,
            adapter=arguments.adapter,
            out=arguments.out,
        )
    except (LockstepError, OSError) as error:
        print_error(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
