# Ends, and leaves a process in a session of its own, without a parent-death signal.
# prints: held
import ctypes
import os
import time

if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    if os.fork() == 0:
        os.closerange(0, 64)
        time.sleep(120)
    os._exit(0)
os.wait()
print("held")
