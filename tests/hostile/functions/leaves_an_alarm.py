# Leaves alarms, as a function with a time limit of its own does when it raises.
# outcome: exception
# says: leaves_an_alarm.py: no
import signal


def score(rollout):
    signal.alarm(1)
    signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)
    raise ValueError("no")
