"""Redirection of library output."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.fixtures.paths import ROOT

LIBRARIES = """
    import logging, os, sys, warnings
    from pathlib import Path
    from lockstep.trainer.run.library_logs import ThirdPartyLog
    libraries = ThirdPartyLog()
    noisy = logging.getLogger("DeepSpeed")
    noisy.addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("accelerate").warning("before the file")
    with libraries.held_output():
        os.system("echo compiled early")
    libraries.open(Path(sys.argv[1]), lambda text: print("warned", text))
    noisy.info("after the file")
    warnings.warn("deprecated")
    logging.getLogger("lockstep.trainer.observe.metrics_log").warning("one of ours")
    with libraries.output_to_file():
        os.system("echo compiled")
    if len(sys.argv) > 2:
        from lockstep.rollout.errors import EngineError
        with libraries.shown_on_failure():
            raise EngineError("it failed")
"""


def test_library_output_goes_to_the_file_and_own_warnings_to_the_console(tmp_path: Path):
    command = [sys.executable, "-c", textwrap.dedent(LIBRARIES), str(tmp_path / "libraries.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "warned one of ours\n"
    assert done.stderr == ""
    said = (tmp_path / "libraries.log").read_text()
    for words in ("before the file", "after the file", "deprecated", "one of ours", "compiled\n", "compiled early"):
        assert words in said, words
    failed = subprocess.run([*command, "fail"], capture_output=True, text=True, timeout=120)
    assert "the last lines of" in failed.stderr.split("Traceback")[0]
    assert "after the file" in failed.stderr.split("Traceback")[0]


def test_the_file_is_not_shown_for_an_error_of_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def on_step(report):\n    return {}['cb']\n")
    code = LIBRARIES.replace("raise EngineError", "__import__('mine').on_step(None)\n            raise EngineError")
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "libraries.log"), "fail"]
    failed = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    )
    assert "KeyError: 'cb'" in failed.stderr
    assert "the last lines of" not in failed.stderr


def test_held_output_is_printed_if_the_start_fails():
    code = """
        import os
        from lockstep.trainer.run.library_logs import ThirdPartyLog
        with ThirdPartyLog().held_output():
            os.system("echo no compiler")
            raise OSError("it failed")
    """
    failed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert failed.stdout == ""
    assert failed.stderr.startswith("no compiler\n")
