"""Lockstep: GRPO and PPO for language models on the Hugging Face stack, with vLLM rollouts.

    import lockstep

    run = lockstep.train(model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, rewards=[my_function], updates=40)

train        train, and return the run
configure    return the checked configuration that `train` would use
stop         end the run of this process after its current update
Run          a run by its directory: model, metrics, rollouts, `resume`
ConfigError  raised for a mistake in the arguments
Step         what an environment of yours answers to a turn

docs/python.md describes them. The packages in here are links to the folders beside this one.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from lockstep import cuda_builds

if TYPE_CHECKING:
    from lockstep.api import Run, configure, stop, train
    from lockstep.rollout.episode.environment import Step
    from lockstep.rollout.errors import ConfigError

    __version__: str

# `python scripts/train.py` puts scripts/ first, where a user's `import evaluate` would find Lockstep's script.
_SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "scripts")
sys.path[:] = [path for path in sys.path if not path or os.path.realpath(path) != _SCRIPTS]

cuda_builds.install()

__all__ = ["ConfigError", "Run", "Step", "__version__", "configure", "stop", "train"]
_PLACES = {"ConfigError": "lockstep.rollout.errors", "Step": "lockstep.rollout.episode.environment"}
"""Modules of names that are not in `lockstep.api`."""


def __getattr__(name: str) -> object:
    """Import the Python interface when it is used: commands and their checks begin without it."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lockstep-rl")
    if name in __all__:
        return getattr(import_module(_PLACES.get(name, "lockstep.api")), name)
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
