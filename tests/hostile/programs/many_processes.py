# Starts processes until it may not; the program itself is one of 16 processes and threads.
# prints: 15
import os
import time

count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
