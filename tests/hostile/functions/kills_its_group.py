# Kills its process group.
# outcome: crashed
# says: was killed by SIGKILL
import os


def score(rollout):
    os.kill(0, 9)
