"""System calls that a program in the sandbox may not make, as a seccomp filter.

The list is short. It holds what gets around a limit of the sandbox, reaches beyond its namespaces, or slows process 1
down; other calls are left to the walls. A refused call fails with EPERM.

Not a library: pyseccomp and libseccomp's own binding need libseccomp.so of the system, which is often not installed.
Source: Documentation/userspace-api/seccomp_filter.rst of the Linux kernel; numbers from asm/unistd_64.h (x86_64) and
asm-generic/unistd.h (aarch64).
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence

from lockstep.rollout.errors import SandboxError

REFUSED = {
    # Memory outside the limit on the address space, some of it also outside tmpfs.
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Keys belong to users and sessions, which namespaces do not separate.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # The kernel's log, which no namespace separates; open to all where kernel.dmesg_restrict is 0.
    "syslog": (103, 116),
    # Large interfaces of the kernel that Python does not use. Calls by io_uring also pass no filter.
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    # They reach process 1, which has the same user and ends the others when it is killed: it must get CPU time.
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
"""Numbers on x86_64 and aarch64, by name."""
PRLIMIT = (302, 261)
"""Allowed for the calling process (0) only."""
SOCKET_CALLS = ((41, 198), (53, 199))
"""`socket` and `socketpair`."""
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. Others are no part of a network namespace (AF_VSOCK) or reach far into the kernel."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the numbers, and AUDIT_ARCH of linux/audit.h."""
X32_BIT = 0x40000000
"""First number of the x32 calls, a second table on x86_64. aarch64 has no calls from there on."""

# linux/filter.h and linux/seccomp.h; offsets in struct seccomp_data, whose arguments have 64 bits, low half first.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ERRNO | EPERM


def refusing_filter(machine: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`. Raises `SandboxError` for an unknown kind of machine."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise SandboxError(f"the sandbox knows the system calls of {' and '.join(MACHINES)}, found {machine}")
    column, architecture = MACHINES[machine]
    refuse, allow = _instruction(_RETURN, _REFUSE), _instruction(_RETURN, _ALLOW)
    program = [_instruction(_LOAD, _ARCHITECTURE), _instruction(_IF_EQUAL, architecture, 1, 0), refuse]
    program += [_instruction(_LOAD, _NUMBER), _instruction(_IF_AT_LEAST, X32_BIT, 0, 1), refuse]
    for numbers in REFUSED.values():
        program += [_instruction(_IF_EQUAL, numbers[column], 0, 1), refuse]
    program += _only_with(PRLIMIT[column], [0])
    for call in SOCKET_CALLS:
        program += _only_with(call[column], FAMILIES)
    return b"".join([*program, allow])


def _only_with(number: int, allowed: Sequence[int]) -> list[bytes]:
    """Refuse a call unless its first argument, an int, is among the allowed ones."""
    checks = [_instruction(_LOAD, _FIRST_ARGUMENT)]
    for value in allowed:
        checks += [_instruction(_IF_EQUAL, value, 0, 1), _instruction(_RETURN, _ALLOW)]
    checks.append(_instruction(_RETURN, _REFUSE))
    return [_instruction(_IF_EQUAL, number, 0, len(checks)), *checks]


def _instruction(code: int, value: int, jump_if_true: int = 0, jump_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_if_true, jump_if_false, value)
