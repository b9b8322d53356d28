"""GRPO and PPO for language models on the Hugging Face stack, with vLLM rollouts: `lockstep.train(model=..., data=rows,
rewards=[f], updates=40)` trains and returns a `Run`. `configure` checks the same arguments, `stop` ends the run of this
process after its update, a mistake raises `ConfigError`, and environments answer with a `Step`: see docs/python.md.

The packages in here are links to the folders beside this one.
"""

import os
import sys
from typing import TYPE_CHECKING

from lockstep import cuda_builds

if TYPE_CHECKING:
    from lockstep.api import ConfigError, Run, Step, __version__, configure, stop, train

# `python scripts/train.py` puts scripts/ first, where a user's `import evaluate` would find Lockstep's script.
_SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "scripts")
sys.path[:] = [path for path in sys.path if not path or os.path.realpath(path) != _SCRIPTS]

cuda_builds.install()

__all__ = ["ConfigError", "Run", "Step", "__version__", "configure", "stop", "train"]


def __getattr__(name: str) -> object:
    """Import the Python interface when it is used: commands and their checks begin without it."""
    if name in __all__:
        from lockstep import api

        return getattr(api, name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
