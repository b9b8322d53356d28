# Makes refused system calls through the tables for other programs: x32, and 32-bit code (int 0x80).
# prints: held
import ctypes
import mmap
import platform

libc = ctypes.CDLL(None, use_errno=True)
broke = []
if platform.machine() == "x86_64":
    X32 = 0x40000000
    if libc.syscall(X32 | 425, 8, ctypes.create_string_buffer(4096)) != -1:
        broke.append("x32")
    # mov eax, 425; mov ebx, 8; xor ecx, ecx; int 0x80; ret: -14 (EFAULT) from the kernel, -1 (EPERM) from a filter
    code = b"\x53\xb8\xa9\x01\x00\x00\xbb\x08\x00\x00\x00\x31\xc9\xcd\x80\x5b\xc3"
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    if call() not in (-1, -38):
        broke.append("int 0x80")
print(*([f"broke {name}" for name in broke] or ["held"]))
