"""Users and systems to run hostile code under: commands in front of a Python command.

Covered: root; a user without rights; root of a container that has one user id, a user's or that of root outside; the
user of a system without user namespaces. A user is made without changing the system: in a mount namespace where the
interpreter is readable, or as another id of a user namespace.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fixtures.paths import ROOT

UID = 54321
AS_USER = f"""
mount --make-rprivate /
blocked=$1 prefix=$2; shift 2
if [ -n "$blocked" ]; then  # a folder on the way to the interpreter that only root may enter: show nothing else of it
    keep=$(mktemp -d); mount --bind "$prefix" "$keep"
    mount -t tmpfs -o mode=755 tmpfs "$blocked"; mkdir -p "$prefix"; mount --move "$keep" "$prefix"; rmdir "$keep"
fi
exec setpriv --reuid {UID} --regid {UID} --clear-groups --bounding-set=-all --inh-caps=-all "$@"
"""
CONTAINER = ("unshare", "--user", "--map-root-user")
# One more user namespace, for the user; the sandbox gets none.
WITHOUT = (*CONTAINER, "sh", "-c", 'echo 1 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh",
           "unshare", "--user", f"--map-user={UID}", f"--map-group={UID}")  # fmt: skip


@functools.cache
def identities() -> dict[str, tuple[str, ...]]:
    """Return the commands by name of the identity, for those that this system allows."""
    if os.geteuid() == 0:
        found = {"root": (), "user": as_user(), "container": (*as_user(), *CONTAINER), "container_of_root": CONTAINER}
    else:
        found = {"user": (), "container": CONTAINER}
    return {name: command for name, command in {**found, "without": WITHOUT}.items() if works(command)}


def as_user() -> tuple[str, ...]:
    prefix = Path(os.path.realpath(sys.base_prefix))
    blocked = [path for path in prefix.parents if not path.stat().st_mode & 0o001]
    return ("unshare", "--mount", "sh", "-ec", AS_USER, "sh", str(blocked[-1]) if blocked else "", str(prefix))


def works(command: Sequence[str]) -> bool:
    return subprocess.run([*command, sys.executable, "-c", ""], capture_output=True).returncode == 0


def run_as(name: str, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run a Python command as an identity, with the modules of this checkout."""
    return subprocess.run(
        [*identities()[name], sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        start_new_session=True,  # what signals its group does not end the test
    )
