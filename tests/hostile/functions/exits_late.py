# Leaves a thread that ends the process during the next call.
# outcome: value
import os
import threading
import time


def end():
    time.sleep(0.3)
    os._exit(0)


def score(rollout):
    threading.Thread(target=end, daemon=True).start()
    return 1.0
