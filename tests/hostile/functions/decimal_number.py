# Returns a number that is not a float.
# outcome: wrong_type
import decimal


def score(rollout):
    return decimal.Decimal("1.0")
