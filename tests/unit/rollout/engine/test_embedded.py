"""Requirements of an embedded engine. The engine itself: tests/integration/test_engine.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.engine.embedded import _check_compiler
from rollout.errors import ConfigError


def test_a_compiled_engine_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "clang++").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    _check_compiler()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"g\+\+ and clang\+\+ cannot be found.*set rollout\.compile_engine=false"):
        _check_compiler()
    monkeypatch.setenv("CXX", "icpx")
    with pytest.raises(ConfigError, match="icpx cannot be found"):
        _check_compiler()
