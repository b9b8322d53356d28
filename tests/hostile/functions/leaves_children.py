# Leaves children that ignore signals.
# outcome: value
import subprocess
import sys

CHILD = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"


def score(rollout):
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", CHILD])
    return 1.0
