# Raises an exception whose message is not valid Unicode.
# outcome: exception


def score(rollout):
    raise ValueError("\ud800\udfff \x00 \x1b[31m")
