"""The importable name of Lockstep. Its packages are links to the folders beside this one."""

import os
import sys
from typing import TYPE_CHECKING

from lockstep import cuda_builds

if TYPE_CHECKING:
    from lockstep.api import Run, configure, stop, train

# `python scripts/train.py` puts scripts/ first, where a user's `import evaluate` would find Lockstep's script.
_SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "scripts")
sys.path[:] = [path for path in sys.path if not path or os.path.realpath(path) != _SCRIPTS]

cuda_builds.install()

__all__ = ["Run", "configure", "stop", "train"]


def __getattr__(name: str) -> object:
    """Import the Python interface when it is used: commands and their checks begin without it."""
    if name in __all__:
        from lockstep import api

        return getattr(api, name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
