# Leaves threads that never end, and hangs.
# outcome: timeout
import threading
import time


def score(rollout):
    for _ in range(16):
        threading.Thread(target=time.sleep, args=(600,)).start()
    time.sleep(600)
