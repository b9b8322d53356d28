# Attaches to process 1, and reads and writes its memory.
# prints: held
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


buffer = ctypes.create_string_buffer(8)
here = Piece(ctypes.addressof(buffer), 8)
there = Piece(id(os), 8)
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
attempts = {
    "attach": libc.ptrace(PTRACE_ATTACH, 1, None, None),
    "seize": libc.ptrace(PTRACE_SEIZE, 1, None, None),
    "read": libc.process_vm_readv(1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
    "write": libc.process_vm_writev(1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0),
}
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
process = libc.syscall(SYS_PIDFD_OPEN, 1, 0)
for descriptor in range(16):
    attempts[f"descriptor {descriptor}"] = libc.syscall(SYS_PIDFD_GETFD, process, descriptor, 0)
for name in ("mem", "environ", "fd", "root", "cwd"):
    try:
        os.listdir(f"/proc/1/{name}") if name in ("fd", "root", "cwd") else open(f"/proc/1/{name}", "rb").read(1)
        attempts[name] = 0
    except OSError:
        pass
print(*([f"broke {name}" for name, result in attempts.items() if result != -1] or ["held"]))
