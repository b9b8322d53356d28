# Raises an exception with 200 MB of message.
# outcome: exception


def score(rollout):
    raise ValueError("x" * 200_000_000)
