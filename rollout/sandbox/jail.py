"""Sandbox setup: makes the namespaces, builds the root file system, drops rights, and becomes process 1.

    launcher ── process 1 of the namespaces ── programs, one after another, each in a session of its own

`sandbox.py` starts it as a script; it imports the standard library and `process_1.py` only. The launcher ends with its
parent. Process 1 ends with the launcher, or with its input; the kernel then kills every other process of
the namespace. Programs cannot reach process 1: signals from inside do not, its memory and descriptors are closed to
other processes, and the system calls that could slow it down are refused. Without namespaces the launcher starts the
programs itself.

Standard input and output: those of `process_1.py`. Its settings have one more entry, walls: null, or binds, writable
(bytes by directory, each in memory) and uids (first and number of the user ids to choose from; null: stay, and give up
capabilities).
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
process_1 = importlib.import_module("process_1")

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR, MOUNT_ATTR_RDONLY = -100, 0x8000, 442, 1
PR_SET_SECUREBITS = 28
SECBIT_NOROOT_LOCKED = 0b11
DEVICES = ("null", "zero", "urandom", "random")

libc, check = process_1.libc, process_1.check


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind, options)]
    check(libc.mount(arguments[0], arguments[1], arguments[2], flags, arguments[3]), f"mount {target}")


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


def enter(binds: list[str], uid: int, writable: dict[str, int]) -> None:
    """Enter a root with the interpreter, four devices, and the writable directories.

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
    for path in writable:
        os.makedirs(root + path)
    read_only(root)
    for path, size in writable.items():
        # In memory, and gone with the namespace. Empty files take memory too, so at most one per page of 4 KiB.
        options = f"mode=700,uid={uid},gid={uid},size={size},nr_inodes={size // 4096}"
        mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chroot(root)
    os.chdir("/")


def main() -> None:
    process_1.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which may finish its update first
    with open("/proc/self/oom_score_adj", "w") as score:  # of memory that runs out, the kernel takes this first
        score.write("1000")
    requests = process_1.Lines(0)
    settings = json.loads(requests.next())
    if settings["walls"] is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # kills the program on its way
        process_1.serve(requests, settings)
        return
    separate(is_user=settings["walls"]["uids"] is None)
    first = os.fork()
    if first == 0:
        be_process_1(settings["walls"])
        process_1.serve(requests, settings)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    os.waitpid(first, 0)  # it has ended only when all other processes of the namespace have


def separate(*, is_user: bool) -> None:
    """Enter new namespaces, as a user with the rights of root in them. The next child is process 1."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    check(libc.unshare(flags | (CLONE_NEWUSER if is_user else 0)), "unshare")
    if is_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def be_process_1(walls: dict) -> None:
    """Enter the root and drop rights."""
    if walls["uids"]:
        uid = own_uid(*walls["uids"])
        enter(walls["binds"], uid, walls["writable"])
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        enter(walls["binds"], 0, walls["writable"])
        check(libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT_LOCKED, 0, 0, 0), "securebits")
    # After the change of the user id, which clears it. If the launcher is gone by now, so is the reader of the answers.
    process_1.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores signals that it does not handle
    check_process_limit()


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


main()
