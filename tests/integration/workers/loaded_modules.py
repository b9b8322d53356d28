"""A run that writes which of Lockstep's modules it had loaded after its first update: a process of its own.

python tests/integration/workers/loaded_modules.py <file> <settings of the run>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(config: Any) -> None:
    from lockstep.trainer.run.run import run

    def write(report: object) -> None:
        PLACE.write_text("\n".join(name for name in sorted(sys.modules) if name.startswith("lockstep.")))

    run(config, on_step=write)


if __name__ == "__main__":
    PLACE = Path(sys.argv.pop(1))
    from lockstep.trainer.cli import launch  # engine processes import this file, too

    launch(main)
