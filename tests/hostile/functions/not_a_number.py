# Returns NaN of numpy.
# outcome: non_finite
import numpy


def score(rollout):
    return numpy.float64("nan")
