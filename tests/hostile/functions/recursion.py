# Recurses without end.
# outcome: exception
# says: RecursionError


def score(rollout):
    return score(rollout)
