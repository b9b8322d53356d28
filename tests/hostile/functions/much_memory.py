# Takes memory beyond the limit.
# outcome: exception
# says: MemoryError


def score(rollout):
    return float(len(bytearray(10 * 2**30)))
