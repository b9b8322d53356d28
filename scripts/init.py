"""Write a settings file for your data, with what its rows show and what they leave open.

    lockstep init train.jsonl                                       writes my_run.yaml
    lockstep init train.csv --model models/mine --out runs/a.yaml
    lockstep init my/data --split train                             of the hub

The file proposes the prompt, the reference, a reward and held-out rows, each with its reason; it is a proposal to read
and to change. On a terminal the model is asked for if it is not given. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("data", help="file of rows (.jsonl, .json, .csv, .parquet), or a hub id")
    parser.add_argument("--model", help="directory or hub id of the model to train")
    parser.add_argument("--split", default="train", help="split of a hub id (train)")
    parser.add_argument("--out", type=Path, default=Path("my_run.yaml"), help="file to write (my_run.yaml)")
    arguments = parser.parse_args()

    from lockstep.rollout.errors import ConfigError, LockstepError
    from lockstep.rollout.safe_text import print_error
    from lockstep.trainer.tools.starter import write_starter

    model = arguments.model
    try:
        if model is None and sys.stdin.isatty() and sys.stdout.isatty():
            model = input("model to train, a directory or a hub id (empty: write it later): ").strip() or None
        left_open = write_starter(arguments.data, arguments.out, model=model, split=arguments.split)
    except LockstepError as error:
        print_error(error)
        return 2 if isinstance(error, ConfigError) else 1
    except (EOFError, KeyboardInterrupt):
        print_error("interrupted; nothing was written")
        return 130
    print(arguments.out)
    for line in left_open:
        print(f"open: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
