# Ends, and leaves a child that holds its output open.
# prints: held
import os
import time

if os.fork() == 0:
    time.sleep(120)
print("held")
