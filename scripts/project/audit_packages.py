"""Look up the locked packages in a database of known vulnerabilities, with pip-audit.

    make audit                               # needs a network; ARGS="--vulnerability-service osv" for another database

Exit status: 0, all packages were looked up and none has a known vulnerability; 1, some have; 2, not all packages could
be looked up, for example without a network. make itself exits with 2 for both, and prints the number. pip-audit alone
exits with 0 also when the database knows no package at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "requirements"
LOCKS = (("cuda.txt", "cpu.txt", "audit.txt"), ("cuda-0.33.txt",))
"""All packages, by call: one takes a single version of each. torch-cpu.txt and build.txt are left out: databases have
no builds, and cuda.txt has their versions."""


def report(program: str, options: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the result of pip-audit by package; None if it failed, after it printed why."""
    packages: dict[tuple[str, str], dict[str, Any]] = {}
    for locks in LOCKS:
        command = [program, "--format", "json", "--progress-spinner", "off", "--require-hashes", "--disable-pip"]
        files = [word for name in locks for word in ("--requirement", str(FOLDER / name))]
        result = subprocess.run([*command, *options, *files], stdout=subprocess.PIPE, text=True, check=False)
        try:
            answer = json.loads(result.stdout)["dependencies"]
        except ValueError:
            return None
        packages |= {(package["name"], package.get("version", "")): package for package in answer}
    return list(packages.values())


def main(program: str, options: Sequence[str]) -> int:
    """Print the findings; return the exit status."""
    packages = report(program, options)
    if packages is None:
        print("audit: the database did not answer (the message of pip-audit is above); nothing was looked up")
        return 2
    vulnerable = [package for package in packages if package.get("vulns")]
    for package in vulnerable:
        for finding in package["vulns"]:
            fixes = ", ".join(finding["fix_versions"]) or "no version yet"
            print(f"audit: {package['name']} {package['version']}: {finding['id']}, mended in {fixes}")
    skips = [package["name"] for package in packages if "skip_reason" in package]
    if skips:
        print(f"audit: {len(skips)} of {len(packages)} packages could not be looked up: {', '.join(skips)}")
    if vulnerable:
        print("audit: to take new versions: make lock ARGS='--upgrade-package NAME'")
        return 1
    if skips or not packages:
        return 2
    print(f"audit: no known vulnerability in {len(packages)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
