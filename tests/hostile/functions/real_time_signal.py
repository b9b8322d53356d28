# Ends its process by a signal without a name.
# outcome: crashed
# says: was killed by signal 40
import os


def score(rollout):
    os.kill(os.getpid(), 40)
