"""The config.yaml of a run that others may have written: read within limits, or refused with a typed error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.saved_config import MAX_BYTES, read_saved

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


def saved(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "config.yaml"


def test_settings_are_read(tmp_path: Path):
    assert read_saved(saved(tmp_path, "model: {path: a}\nseed: 3\n")) == {"model": {"path": "a"}, "seed": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {path: '${oc.env:WANDB_API_KEY}'}", "interpolation"),
        ("'${oc.env:HOME}': 1", "interpolation"),
        ("a: \"\\x24{oc.env:HOME}\"", "interpolation"),
        (BOMB, "alias"),
        ("a: &a {b: *a}", "alias"),
        ("a: " + "[" * 5000, "deep"),
        ("a: " + "{b: " * 5000, "deep"),
        ("a: [1, 2", "cannot be read"),
        ("- 1", "mapping"),
        ("5", "mapping"),
        ("", "mapping"),
        ("a: !!python/object/apply:os.system [x]", "cannot be read"),
        ("a: 1\na: 2", "cannot be read"),
        ("? [1, 2]\n: 3", "cannot be read"),
        ("a: " + "x" * MAX_BYTES, "bytes"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_at_once(tmp_path: Path, text: str, words: str):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        read_saved(saved(tmp_path, text))
    assert time.monotonic() - started < 5


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    (tmp_path / "config.yaml").write_bytes(b"a: \xff\xfe\x00")
    for path in (tmp_path / "config.yaml", tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_saved(path)
