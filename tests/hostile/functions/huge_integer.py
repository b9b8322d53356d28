# Returns an integer beyond floats.
# outcome: non_finite


def score(rollout):
    return 10**5000
