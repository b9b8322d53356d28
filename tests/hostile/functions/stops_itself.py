# Stops its process.
# outcome: timeout
import os


def score(rollout):
    os.kill(os.getpid(), 19)
