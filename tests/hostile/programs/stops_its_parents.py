# Sends SIGSTOP to every process id that exists.
# prints: held
import os

for number in range(1, 2000):
    try:
        if number != os.getpid():
            os.kill(number, 19)
    except ProcessLookupError:
        pass
print("held")
