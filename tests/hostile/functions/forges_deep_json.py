# Writes brackets that nest too deeply for a parser.
# outcome: crashed
import os


def score(rollout):
    for descriptor in range(3, 4096):
        try:
            os.write(descriptor, b"[" * 100_000 + b"\n")
        except OSError:
            pass
    return 1.0
