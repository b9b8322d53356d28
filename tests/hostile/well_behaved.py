"""A reward function that needs a while, imports a module and writes; hostile ones run before it in its process."""

import time


def score(rollout):
    import decimal
    import json
    import subprocess

    time.sleep(0.6)
    assert subprocess.run(["true"]).returncode == 0
    print(json.dumps([1]))
    return float(decimal.Decimal("0.5"))
