# Reads the keys of the trainer's session, and lists keys.
# prints: held
import ctypes
import platform

libc = ctypes.CDLL(None, use_errno=True)
keyctl, request_key = (250, 249) if platform.machine() == "x86_64" else (219, 218)
SEARCH, READ, SESSION, USER, USER_SESSION = 10, 11, -3, -4, -5
broke = []
found = [libc.syscall(request_key, b"user", b"trainer-secret", None, 0)]
found += [libc.syscall(keyctl, SEARCH, ring, b"user", b"trainer-secret", 0) for ring in (SESSION, USER, USER_SESSION)]
for key in found:
    if key != -1:
        text = ctypes.create_string_buffer(64)
        libc.syscall(keyctl, READ, key, text, 64)
        broke.append(f"broke {text.value}")
try:
    broke += [f"broke {line}" for line in open("/proc/keys") if "trainer-secret" in line]
except OSError:
    pass
print(*(broke or ["held"]))
