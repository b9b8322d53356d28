# Starts threads until it may not; the program itself is one of 16. Memory for their stacks may end first.
# prints: held
import threading

event = threading.Event()
count = 0
try:
    while count < 100:
        threading.Thread(target=event.wait, daemon=True).start()
        count += 1
except RuntimeError:
    pass
print("held" if 8 <= count <= 15 else f"broke {count}")
event.set()
