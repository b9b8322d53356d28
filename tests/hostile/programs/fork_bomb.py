# Doubles its processes again and again. Bounded by itself as well, so that a failure of this test spares the machine.
# ended: timeout
import os
import time

for _ in range(8):
    try:
        os.fork()
    except OSError:
        pass
time.sleep(120)
