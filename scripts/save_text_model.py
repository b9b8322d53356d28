"""Save the text model of a checkpoint with a vision tower as a model of its own, which Lockstep trains.

    lockstep save-text-model <directory or hub id> <directory to write>

The whole checkpoint is loaded on the CPU, in its own dtype. Tokenizer and generation config are saved, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or hub id")
    parser.add_argument("directory", type=Path, help="where to save the text model")
    arguments = parser.parse_args()

    from lockstep.trainer.model.text_model import save_text_model

    save_text_model(arguments.model, arguments.directory)
    print(f"model.path={arguments.directory}")


if __name__ == "__main__":
    main()
