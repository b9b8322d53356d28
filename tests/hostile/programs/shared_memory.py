# Takes memory that the limit on its address space does not count.
# prints: held
import ctypes
import os
import platform

libc = ctypes.CDLL(None, use_errno=True)
IPC_CREAT, PRIVATE = 0o1000, 0
broke = []
if libc.shmget(PRIVATE, 2**30, IPC_CREAT | 0o600) != -1:
    broke.append("shmget")
if libc.msgget(PRIVATE, IPC_CREAT | 0o600) != -1:
    broke.append("msgget")
if libc.semget(PRIVATE, 32000, IPC_CREAT | 0o600) != -1:
    broke.append("semget")
try:
    os.memfd_create("x")
    broke.append("memfd_create")
except OSError:
    pass
MEMFD_SECRET = 447
if libc.syscall(MEMFD_SECRET, 0) != -1:
    broke.append("memfd_secret")
if libc.syscall(240 if platform.machine() == "x86_64" else 180, b"x", os.O_CREAT | os.O_RDWR, 0o600, None) != -1:
    broke.append("mq_open")
print(*([f"broke {name}" for name in broke] or ["held"]))
