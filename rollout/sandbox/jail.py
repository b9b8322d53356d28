"""Sandbox setup: makes the namespaces, builds the root file system, drops rights, and starts the program.

    launcher ── process 1 of the namespaces ── the program, in a session of its own

`rollout/sandbox/sandbox.py` starts it as a script; it imports the standard library only and is never imported. The
launcher ends with its parent. Process 1 ends with the launcher; the kernel then kills every other process of the
namespace. The program cannot reach process 1: signals from inside do not, its memory and descriptors are closed to
other processes, and the system calls that could slow it down are refused. Without namespaces the launcher starts the
program itself.

Argument: the descriptor of a pipe, which gets a line when the program starts, and a line with its exit status or minus
the number of its signal. Standard input: JSON with workdir (empty: build the root), binds, disk_bytes, uids (first and
number of the user ids to choose from; null: stay, and give up capabilities), files by name, command, limits by name of
the rlimit, filter (the seccomp filter, in hexadecimal).
"""

import ctypes
import json
import os
import resource
import signal
import sys

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR, MOUNT_ATTR_RDONLY = -100, 0x8000, 442, 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 28, 38
SECCOMP_MODE_FILTER = 2
SECBIT_NOROOT_LOCKED = 0b11
KEYCTL, KEYCTL_JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine), 1
DEVICES = ("null", "zero", "urandom", "random")

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


class FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    check(libc.mount(encoded[0], encoded[1], encoded[2], flags, encoded[3]), f"mount {target}")


def bind(source: str, root: str) -> None:
    """Bind a file or directory of the host into the new root, at the same path."""
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, None, MS_BIND | MS_REC)


def read_only(path: str) -> None:
    attributes = MountAttributes(set=MOUNT_ATTR_RDONLY)
    size = ctypes.sizeof(attributes)
    check(
        libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(attributes), size),
        "mount_setattr",
    )


def own_uid(first: int, count: int) -> int:
    """Return a user id that no other sandbox of this machine has, by the kernel's number of the PID namespace."""
    return first + os.stat("/proc/self/ns/pid").st_ino % count


def enter(binds: list[str], uid: int, disk_bytes: int) -> None:
    """Enter a root with the interpreter, four devices, and one writable directory.

    Without /proc: programs do not need it, and inside a container a user may not mount it.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # Mounted over a directory that every system has and that the new root does not show, so none is left behind.
    root = "/proc"
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m")
    for path in binds:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            bind(path, root)
    for name in DEVICES:
        bind(f"/dev/{name}", root)
    os.makedirs(root + "/sandbox")
    read_only(root)
    # In memory, and gone with the namespace. Empty files take memory too, so at most one per page of 4 KiB.
    options = f"mode=700,uid={uid},gid={uid},size={disk_bytes},nr_inodes={disk_bytes // 4096}"
    mount("tmpfs", root + "/sandbox", "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chroot(root)
    os.chdir("/sandbox")


def main() -> None:
    report = int(sys.argv[1])
    die_with_parent()
    with open("/proc/self/oom_score_adj", "w") as score:  # of memory that runs out, the kernel takes this first
        score.write("1000")
    settings = json.load(sys.stdin)
    if settings["workdir"]:
        os.chdir(settings["workdir"])
        program = start(settings, report)
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(program, signal.SIGKILL))
        os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
        os.killpg(program, signal.SIGKILL)  # before it is waited for: until then no other group can have its number
        wait_for(program, report)
        return
    separate(is_user=settings["uids"] is None)
    first = os.fork()
    if first == 0:
        be_process_1(settings, report)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    os.waitpid(first, 0)  # it has ended only when all other processes of the namespace have


def die_with_parent() -> None:
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")


def separate(*, is_user: bool) -> None:
    """Enter new namespaces, as a user with the rights of root in them. The next child is process 1."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    check(libc.unshare(flags | (CLONE_NEWUSER if is_user else 0)), "unshare")
    if is_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def be_process_1(settings: dict, report: int) -> None:
    """Enter the root, drop rights, and wait for the program in a way that it cannot disturb."""
    if settings["uids"]:
        uid = own_uid(*settings["uids"])
        enter(settings["binds"], uid, settings["disk_bytes"])
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        enter(settings["binds"], 0, settings["disk_bytes"])
        check(libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT_LOCKED, 0, 0, 0), "securebits")
    die_with_parent()  # after the change of the user id, which clears it; if the launcher is gone, see `start`
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores signals that it does not handle
    check_process_limit()
    program = start(settings, report)
    os.closerange(0, report)
    os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
    wait_for(program, report)


def check_process_limit() -> None:
    """Raise if the number of processes cannot be limited, as for root of the host as the only user of a container."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        try:
            os.fork()
        except BlockingIOError:
            os._exit(0)
        os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        raise OSError("the system does not limit the number of processes of this user, who is root outside")


def start(settings: dict, report: int) -> int:
    """Start the program in a session of its own and return its process id."""
    for name, text in settings["files"].items():
        with open(name, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    child = os.fork()
    if child:
        return child
    os.setsid()
    die_with_parent()
    if KEYCTL:  # a new session keyring; where a container refuses the call, the program has no keys either
        libc.syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.set_inheritable(report, False)
    for name, limit in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    instructions = bytes.fromhex(settings["filter"])
    if instructions:
        program = FilterProgram(len(instructions) // 8, instructions)
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")
    os.write(report, b"started\n")  # fails if the sandbox has given up meanwhile
    os.execve(settings["command"][0], settings["command"], {"HOME": "/sandbox", "LANG": "C.UTF-8", "PATH": "/usr/bin"})


def wait_for(program: int, report: int) -> None:
    """Reap all children until the program has ended, and report its status."""
    while True:
        pid, status = os.wait()
        if pid == program:
            os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
            return


main()
