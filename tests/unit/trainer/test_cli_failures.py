"""Exit status of a command whose work fails, whatever it leaves open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.models import save_tiny_model
from tests.fixtures.paths import ROOT
from tests.fixtures.tokenizers import chat_tokenizer

FAILS = """
import atexit, sys, threading
from lockstep.rollout.errors import ConfigError, EngineError
from lockstep.trainer.cli import launch

class Aborts:  # as a transport does whose peers are still connected
    def __del__(self):
        import os
        os.abort()

def main(config):
    global left_open
    left_open = Aborts()
    atexit.register(print, "closed the engines")
    threading.Thread(target=threading.Event().wait).start()
    raise {error}

sys.argv = ["train.py", "model.path={model}", "data.path={data}", "run_name=x"]
launch(main, check=lambda config: None)
"""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("EngineError('no answer')", 1, "lockstep: EngineError: no answer"),
        ("ConfigError('bad server')", 2, "lockstep: bad server"),
        ("KeyError('a defect')", 1, "KeyError: 'a defect'"),
    ],
)
def test_a_failure_has_its_status_and_message_and_waits_for_nothing(
    error: str, status: int, said: str, tmp_path: Path
) -> None:
    code = FAILS.format(error=error, model=tmp_path, data=tmp_path / "x.jsonl")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "closed the engines" in done.stdout


def test_a_run_that_cannot_reach_its_engine_exits_with_status_1(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    url = "http://127.0.0.1:9"  # the discard port, on which nothing listens
    model = save_tiny_model(tmp_path, tied=True)
    chat_tokenizer("qwen3").save_pretrained(model)
    arguments = [f"model.path={model}", f"data.path={data}", "data.heldout_path=null"]
    arguments += ["rollout=server", f"rollout.urls=[{url}]", f"run_root={tmp_path}", "rollout.start_timeout_s=1"]
    arguments += ["rollout.api_key_env=null", "reward=numeric"]
    done = subprocess.run(
        [sys.executable, "scripts/train.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert url in done.stderr


def test_an_interrupt_while_the_libraries_load_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    ended = subprocess.run(
        [sys.executable, "scripts/train.py", "dry_run=true"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "lockstep: interrupted\n")
