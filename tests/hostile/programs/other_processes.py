# Looks for other processes: in /proc, by signals, and by their sessions.
# prints: held
import os

broke = []
for number in [*range(2, 70000)]:
    if number == os.getpid():
        continue
    try:
        os.kill(number, 0)
        broke.append(f"signals {number}")
    except ProcessLookupError:
        pass
    except PermissionError:
        broke.append(f"sees {number}")
if os.path.isdir("/proc"):
    broke += [f"/proc/{name}" for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]
if os.getppid() > 1 or os.getsid(0) != os.getpid():
    broke.append("its session belongs to another")
print(*([f"broke {name}" for name in broke[:5]] or ["held"]))
