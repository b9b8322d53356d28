# Replaces its process by another program.
# outcome: crashed timeout
import os


def score(rollout):
    os.execvp("sleep", ["sleep", "60"])
