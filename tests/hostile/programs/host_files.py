# Reads and writes files of the host.
# prints: held
import os

SECRETS = (
    "/etc/passwd",
    "/etc/shadow",
    "/proc/kcore",
    "/proc/1/environ",
    "/proc/self/environ",
    "/dev/mem",
)
FOLDERS = ("/home", "/tmp", "/var", "/etc", "/sys", "/proc/1", "/run", "/dev/shm", "/mnt", "/opt")
broke = []
for path in SECRETS:
    try:
        if path == "/proc/self/environ" and "hunter2" not in open(path).read():
            continue
        broke.append(f"{path} {open(path, 'rb').read(20)!r}")
    except OSError:
        pass
for path in FOLDERS:
    try:
        names = os.listdir(path)
        if names not in ([], ["ld.so.cache"]):
            broke.append(f"{path} {names[:3]}")
    except OSError:
        pass
for path in ("/", "/usr", "/usr/lib", "/dev", "/etc", "/lib", "/bin", "/proc", "/usr/bin/env", os.__file__):
    try:
        open(f"{path}/planted" if os.path.isdir(path) else path, "a").close()
        broke.append(f"wrote {path}")
    except OSError:
        pass
print(*([f"broke {name}" for name in broke] or ["held"]))
