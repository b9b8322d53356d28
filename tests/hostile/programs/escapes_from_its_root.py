# Leaves its root, mounts, makes namespaces, and takes rights.
# prints: held
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
attempts = {f"unshare {flag:#x}": libc.unshare(flag) for flag in (NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET)}
attempts |= {
    "mount tmpfs": libc.mount(b"none", b"/sandbox", b"tmpfs", 0, None),
    "remount": libc.mount(b"none", b"/usr", None, 32 | 4096, None),
    "umount": libc.umount2(b"/usr", 2),
    "chroot": libc.chroot(b"."),
    "pivot_root": libc.syscall(155 if os.uname().machine == "x86_64" else 41, b".", b"."),
    "setuid": libc.setuid(4242),
    "setgid": libc.setgid(4242),
    "setgroups": libc.setgroups(0, None),
    "mknod": libc.mknod(b"disk", 0o60600, os.makedev(8, 0)),
    "sethostname": libc.sethostname(b"x", 1),
    "setns": libc.setns(0, 0),
}
for _ in range(40):
    os.chdir("..")
attempts["above the root"] = 0 if os.path.exists("home") and os.listdir("home") else -1
print(*([f"broke {name}" for name, result in attempts.items() if result != -1] or ["held"]))
