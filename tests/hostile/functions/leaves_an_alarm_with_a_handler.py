# Leaves an alarm whose handler raises.
# outcome: value
import signal


def handler(*_):
    raise TimeoutError("late")


def score(rollout):
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0
