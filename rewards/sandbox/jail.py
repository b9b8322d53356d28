"""Sandbox setup inside the new namespaces: builds the root file system, drops rights, and becomes the program.

`rewards/sandbox/sandbox.py` starts it as a script; it imports the standard library only and is never imported.
Standard input: JSON with workdir (empty: build the root), binds, disk_bytes, uids (first and number of the user ids to
choose from; null: stay, and give up capabilities), files by name, command, limits by name of the rlimit.
"""

import ctypes
import json
import os
import resource
import sys

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR, MOUNT_ATTR_RDONLY = -100, 0x8000, 442, 1
PR_SET_PDEATHSIG, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 28, 38
SIGKILL = 9
SECBIT_NOROOT_LOCKED = 0b11
DEVICES = ("null", "zero", "urandom", "random")

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


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
    """Enter a root with the interpreter, four devices, /proc of this namespace, and one writable directory."""
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
    os.makedirs(root + "/proc")
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    os.makedirs(root + "/sandbox")
    read_only(root)
    # In memory, and gone with the namespace. Empty files take memory too, so at most one per page of 4 KiB.
    options = f"mode=700,uid={uid},gid={uid},size={disk_bytes},nr_inodes={disk_bytes // 4096}"
    mount("tmpfs", root + "/sandbox", "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chroot(root)
    os.chdir("/sandbox")


def main() -> None:
    settings = json.load(sys.stdin)
    if settings["workdir"]:
        os.chdir(settings["workdir"])
    elif settings["uids"]:
        uid = own_uid(*settings["uids"])
        enter(settings["binds"], uid, settings["disk_bytes"])
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        enter(settings["binds"], 0, settings["disk_bytes"])
        check(libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT_LOCKED, 0, 0, 0), "securebits")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # Repeats `unshare --kill-child`, which the change of the user id has cleared.
    check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "pdeathsig")
    for name, text in settings["files"].items():
        with open(name, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    for name, limit in settings["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    os.execve(settings["command"][0], settings["command"], {"HOME": "/sandbox", "LANG": "C.UTF-8", "PATH": "/usr/bin"})


main()
