# Replaces and closes the standard streams.
# outcome: value
import sys


def score(rollout):
    sys.stdout.close()
    sys.stderr = None
    return 1.0
