# Sends every signal to process 1, and SIGKILL to all processes that it can see.
# prints: held
import os

for number in range(1, 65):
    if number not in (32, 33):
        os.kill(1, number)
try:
    os.kill(-1, 9)
except ProcessLookupError:
    pass
print("held")
