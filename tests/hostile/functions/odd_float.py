# Returns a float whose conversion raises.
# outcome: crashed exception wrong_type value


class Odd(float):
    def __float__(self):
        raise SystemExit(4)


def score(rollout):
    return Odd(1.0)
