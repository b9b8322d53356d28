# Leaves a key for the next program, which looks for it first.
# runs: 2
# prints: held
import ctypes
import platform

libc = ctypes.CDLL(None, use_errno=True)
keyctl, request_key, add_key = (250, 249, 248) if platform.machine() == "x86_64" else (219, 218, 217)
found = libc.syscall(request_key, b"user", b"left-by-a-program", None, 0)
for ring in (-3, -4, -5):
    libc.syscall(add_key, b"user", b"left-by-a-program", b"memory", 6, ring)
print("held" if found == -1 else "broke: found the key of an earlier program")
