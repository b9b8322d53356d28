# Raises an exception whose message ends the process.
# outcome: crashed
import sys


class Odd(Exception):
    def __str__(self):
        sys.exit(3)


def score(rollout):
    raise Odd
