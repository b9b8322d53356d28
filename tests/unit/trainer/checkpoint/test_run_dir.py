"""Run directories: names, locks, saved settings."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import textwrap
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checkpoint.run_dir import open_run
from lockstep.trainer.config.groups.outputs_settings import GatewayConfig
from lockstep.trainer.config.redaction import REDACTED
from lockstep.trainer.config.schema import Config
from tests.fixtures.forked_python import forked_python
from tests.fixtures.saved_state import SavedState


def test_the_saved_config_holds_no_key(tmp_path):
    config = Config(run_root=str(tmp_path), run_name="a", gateway=GatewayConfig(api_key="hunter2"))
    directory, lock = open_run(config, SavedState())
    assert "hunter2" not in directory.config.read_text()
    assert REDACTED in directory.config.read_text()
    assert lock is not None
    lock.close()


@pytest.mark.parametrize(
    ("words", "environment", "label"),
    [
        (["scripts/train.py", "experiment=real_words", "updates=2"], "single_turn", "real_words"),
        (["scripts/train.py", "updates=2"], "single_turn", "single_turn"),
        (["scripts/train.py"], "envs/my_env.py:MyEnvironment", "my_env"),
    ],
)
def test_a_run_is_named_after_its_experiment_or_its_environment(
    words: list[str], environment: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    config = Config(run_root=str(tmp_path))
    config.environment.name = environment
    directory, lock = open_run(config, SavedState())
    assert lock is not None
    lock.close()
    assert re.fullmatch(rf"{label}-\d{{8}}-\d{{6}}", directory.path.name)


def test_only_one_process_runs_in_a_directory(tmp_path):
    config = Config(run_root=str(tmp_path), run_name="a", resume="auto")
    _, lock = open_run(config, SavedState())
    assert lock is not None
    other = textwrap.dedent(f"""
        import sys
        from lockstep.rollout.errors import ConfigError
        from tests.fixtures.saved_state import SavedState
        from lockstep.trainer.config.schema import Config
        from lockstep.trainer.checkpoint.run_dir import open_run
        try:
            open_run(Config(run_root={str(tmp_path)!r}, run_name="a", resume="auto"), SavedState())
        except ConfigError as error:
            print(error)
    """)
    asked = [forked_python(), "-c", other]
    assert "another process is running" in subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    lock.close()
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == ""
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        open_run(Config(run_root=str(tmp_path), run_name="a"), SavedState())


def opened(root: str, start: Barrier, results: Queue) -> None:
    """Open the same run as other processes at the same moment, and stay until all have tried."""
    start.wait()
    try:
        _, lock = open_run(Config(run_root=root, run_name="a"), SavedState())
        assert lock is not None
        results.put("opened")
    except ConfigError as error:
        lock = None
        results.put("refused" if "another process" in str(error) or "not overwritten" in str(error) else str(error))
    start.wait()


def test_only_one_of_simultaneous_runs_gets_the_directory(tmp_path):
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.fixtures.saved_state"])
    start, results = processes.Barrier(3), processes.Queue()
    own = [processes.Process(target=opened, args=(str(tmp_path), start, results)) for _ in range(3)]
    for process in own:
        process.start()
    found = sorted(results.get(timeout=60) for _ in own)
    for process in own:
        process.join(timeout=60)
    assert found == ["opened", "refused", "refused"]


def test_runs_that_begin_in_the_same_second_get_different_directories(tmp_path, monkeypatch):
    """So do runs in the repeated hour at the end of daylight saving time."""
    monkeypatch.setattr(time, "strftime", lambda _: "20261025-023000")
    names = []
    for _ in range(3):
        directory, lock = open_run(Config(run_root=str(tmp_path)), SavedState())
        assert lock is not None
        lock.close()
        names.append(directory.path.name)
    assert len(set(names)) == 3
    assert names[1] == f"{names[0]}-2"


@pytest.mark.parametrize("folder", ["{elsewhere}/", "envs/", "../", ""], ids=["absolute", "below", "above", "plain"])
def test_a_run_directory_is_below_run_root_wherever_the_environment_is(tmp_path, monkeypatch, folder):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = Config(run_root="runs")
    config.environment.name = f"{folder.format(elsewhere=tmp_path / 'elsewhere')}my_env.py:Env"
    directory, lock = open_run(config, SavedState())
    assert lock is not None
    lock.close()
    assert directory.path.parent == Path("runs")
    assert directory.path.name.startswith("my_env-2")
    assert Path("runs/latest").resolve() == directory.path.resolve()


def test_latest_is_replaced_only_if_it_is_a_link(tmp_path, caplog):
    for name in ("a", "b"):
        _, lock = open_run(Config(run_root=str(tmp_path), run_name=name), SavedState())
        assert lock is not None
        lock.close()
        assert (tmp_path / "latest").readlink() == Path(name)
    for make in (Path.touch, Path.mkdir):
        own = tmp_path / make.__name__
        own.mkdir()
        make(own / "latest")
        _, lock = open_run(Config(run_root=str(own), run_name="a"), SavedState())
        assert lock is not None
        lock.close()
        assert not (own / "latest").is_symlink()
        assert "latest is not a link" in caplog.text
        assert sorted(entry.name for entry in own.iterdir()) == ["a", "latest"]
        caplog.clear()
