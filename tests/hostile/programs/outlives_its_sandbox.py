# Clears the parent-death signal, closes its output, leaves its session, and stays.
# ended: timeout
import ctypes
import os
import time

ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
for descriptor in (0, 1, 2):
    os.close(descriptor)
try:
    os.setsid()
except PermissionError:  # it already leads a session
    pass
time.sleep(120)
