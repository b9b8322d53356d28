# Opens interfaces of the kernel that no Python program needs, and reads its log.
# prints: held
import ctypes
import platform
import socket

libc = ctypes.CDLL(None, use_errno=True)
is_x86 = platform.machine() == "x86_64"
page = ctypes.create_string_buffer(4096)
calls = {
    "io_uring_setup": (425, 8, page),
    "userfaultfd": (323 if is_x86 else 282, 1),
    "bpf": (321 if is_x86 else 280, 0, page, 128),
    "syslog": (103 if is_x86 else 116, 3, page, 4096),
    "perf_event_open": (298 if is_x86 else 241, page, 0, -1, -1, 0),
}
broke = [name for name, call in calls.items() if libc.syscall(*call) != -1]
families = {"AF_NETLINK": 16, "AF_PACKET": 17, "AF_CAN": 29, "AF_TIPC": 30, "AF_ALG": 38, "AF_VSOCK": 40, "AF_XDP": 44}
for name, family in families.items():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind).close()
            broke.append(name)
        except OSError:
            pass
print(*([f"broke {name}" for name in broke] or ["held"]))
