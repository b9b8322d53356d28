"""The importable name of Lockstep. Its packages are links to the folders beside this one."""

import os
import sys

# `python scripts/train.py` puts scripts/ first, where a user's `import evaluate` would find Lockstep's script.
_SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "scripts")
sys.path[:] = [path for path in sys.path if not path or os.path.realpath(path) != _SCRIPTS]
