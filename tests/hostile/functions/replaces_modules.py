# Replaces standard modules by other objects.
# outcome: value
import sys
import types


def score(rollout):
    for name in ("json", "asyncio", "socket"):
        sys.modules[name] = types.ModuleType(name)
    return 1.0
