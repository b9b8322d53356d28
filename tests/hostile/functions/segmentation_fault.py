# Reads an address that is not there.
# outcome: crashed
# says: was killed by SIGSEGV
import ctypes


def score(rollout):
    ctypes.string_at(0)
