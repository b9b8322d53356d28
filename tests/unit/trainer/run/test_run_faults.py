"""Loggers that fail, secrets in settings, text of models on the console, heartbeats, limits of time, locks."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import subprocess
import textwrap
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import pytest
import wandb
from rich.console import Console

from rollout.errors import ConfigError
from tests.fixtures.forked_python import forked_python
from tests.fixtures.saved_state import SavedState
from tests.unit.rewards.workers.test_pool import rollout
from trainer.checkpoint.run_dir import open_run
from trainer.config.redaction import REDACTED, redact, redact_words
from trainer.config.schema import Config, GatewayConfig, LoggerConfig
from trainer.observe.console import RunConsole
from trainer.observe.metrics_log import MetricsLog
from trainer.run.heartbeat import Heartbeat, WallTime


class Failing:
    """A W&B run that fails wherever it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __getattr__(self, name: str):
        def call(*args: object, **kwargs: object) -> None:
            if name == self.where:
                raise RuntimeError("quota exceeded")

        return call


@pytest.mark.parametrize("where", ["init", "define_metric", "log", "finish"])
def test_wandb_that_fails_is_one_warning_and_a_count(tmp_path, monkeypatch, caplog, where):
    def init(**_: object) -> Failing:
        if where == "init":
            raise RuntimeError("quota exceeded")
        return Failing(where)

    monkeypatch.setattr(wandb, "init", init)
    with caplog.at_level(logging.WARNING):
        metrics = MetricsLog(tmp_path / "metrics.jsonl", LoggerConfig(wandb="online"), run_config={})
        for step in range(3):
            metrics.write(step, {"x": 1.0})
        metrics.close()
    assert [record.message.count("quota exceeded") for record in caplog.records] == [1]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["x"] for line in lines] == [1.0] * 3
    expected = {"init": 1.0, "define_metric": 1.0, "log": 2.0, "finish": None}[where]
    assert lines[-1].get("health/logger_errors") == expected


def test_a_metrics_file_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    metrics = MetricsLog(tmp_path / "none" / "metrics.jsonl", LoggerConfig(), run_config={})
    metrics.write(1, {"x": 1.0})
    metrics.write(2, {"x": 1.0})
    assert len(caplog.records) == 1


SECRETS = {
    "gateway": {"api_key": "hunter2", "port": 8000, "host": "127.0.0.1"},
    "settings": {"judge": {"HF_TOKEN": "hunter2", "url": "https://user:hunter2@host/v1", "api_key_env": "JUDGE_KEY"}},
    "tools": ["--key", "sk-hunter2hunter2hunter2"],
    "note": "Bearer hunter2hunter2 and hf_hunter2hunter2hunter2",
    "password": ["hunter2"],
}


def test_secrets_are_redacted_and_nothing_else_is():
    shown = redact(SECRETS)
    assert "hunter2" not in json.dumps(shown)
    assert shown["gateway"] == {"api_key": REDACTED, "port": 8000, "host": "127.0.0.1"}
    assert shown["settings"]["judge"]["api_key_env"] == "JUDGE_KEY"
    plain = {"max_tokens": 5, "token_budget": 16384, "stop_token_ids": [1], "tokenizer": "x", "mode": "token_truncate"}
    assert redact(plain) == plain
    assert redact({"token_level": "a", "importance_sampling_level": "token", "api_key": None}) == {
        "token_level": "a", "importance_sampling_level": "token", "api_key": None}  # fmt: skip


def test_a_number_under_a_name_of_secrets_is_redacted():
    assert redact({"password": 123456, "max_tokens": 5, "token": True}) == {
        "password": REDACTED, "max_tokens": 5, "token": True}  # fmt: skip


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("gateway.api_key=hunter2", "gateway.api_key=<redacted>"),
        ("++gateway.api_key=2222", "++gateway.api_key=<redacted>"),
        ("+api_key='hunter 2'", "+api_key=<redacted>"),
        ("url=https://user:hunter2@host/v1", "url=https://<redacted>@host/v1"),
        ("--config-dir=https://user:hunter2@host", "--config-dir=https://<redacted>@host"),
        ("sk-hunter2hunter2hunter2", "<redacted>"),
        ("reward.settings={judge: {token: hunter2, n: 3}}", "reward.settings={judge: {token: '<redacted>', n: 3}}"),
        ("x={api_key:hunter2,who:'it\\'s',on:true}", "x={api_key: '<redacted>', who: 'it\\'s', on: true}"),
    ],
)
def test_secrets_on_a_command_line_are_redacted(word: str, shown: str):
    assert redact_words([word]) == [shown]


def test_the_rest_of_a_command_line_is_as_it_was_typed():
    words = [
        "train.py",
        "--cfg",
        "job",
        "api_key=null",
        "a='x y'",
        "b={c:d}",
        "~x",
        "updates=5",
        "rollout.urls=[]",
        "=",
    ]
    assert redact_words(words) == words


def test_the_saved_config_holds_no_key(tmp_path):
    config = Config(run_root=str(tmp_path), run_name="a", gateway=GatewayConfig(api_key="hunter2"))
    directory, lock = open_run(config, SavedState())
    assert "hunter2" not in directory.config.read_text()
    assert REDACTED in directory.config.read_text()
    assert lock is not None
    lock.close()


def test_one_run_directory_has_one_process(tmp_path):
    config = Config(run_root=str(tmp_path), run_name="a", resume="auto")
    _, lock = open_run(config, SavedState())
    assert lock is not None
    other = textwrap.dedent(f"""
        import sys
        from rollout.errors import ConfigError
        from tests.fixtures.saved_state import SavedState
        from trainer.config.schema import Config
        from trainer.checkpoint.run_dir import open_run
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
    """One of several processes that open the same run at the same moment, and stay until all have tried."""
    start.wait()
    try:
        _, lock = open_run(Config(run_root=root, run_name="a"), SavedState())
        assert lock is not None
        results.put("opened")
    except ConfigError as error:
        lock = None
        results.put("refused" if "another process" in str(error) or "not overwritten" in str(error) else str(error))
    start.wait()


def test_of_runs_that_begin_at_the_same_moment_one_has_the_directory(tmp_path):
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


def test_runs_that_begin_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    """So do runs that begin in an hour that comes twice."""
    monkeypatch.setattr(time, "strftime", lambda _: "20261025-023000")
    names = []
    for _ in range(3):
        directory, lock = open_run(Config(run_root=str(tmp_path)), SavedState())
        assert lock is not None
        lock.close()
        names.append(directory.path.name)
    assert len(set(names)) == 3
    assert names[1] == f"{names[0]}-2"


def test_text_of_a_model_cannot_style_the_console():
    console = RunConsole(enabled=True, total_updates=1)
    stream = io.StringIO()
    console._console = Console(file=stream, force_terminal=True, soft_wrap=True, highlight=False)
    console.sample(rollout("[bold red]alarm[/bold red] [link=http://x]y[/link] [/] \\[x"))
    console.warn("[red]a[/red]")
    console.say("[link=http://x]y[/link]")
    shown = stream.getvalue()
    assert "[bold red]alarm[/bold red] [link=http://x]y[/link] [/]" in shown
    assert "[red]a[/red]" in shown
    assert "\x1b]8;" not in shown  # no link was made


def test_a_heartbeat_says_where_a_rank_is(tmp_path):
    heart = Heartbeat(tmp_path, rank=1, step_timeout_s=0.0)
    heart.beat("step", update=3)
    line = json.loads((tmp_path / "heartbeat" / "rank-1.json").read_text())
    assert (line["rank"], line["pid"], line["update"], line["stage"]) == (1, os.getpid(), 3, "step")
    heart.beat("checkpoint", update=3)
    assert json.loads((tmp_path / "heartbeat" / "rank-1.json").read_text())["stage"] == "checkpoint"
    heart.close()


HANGS = """
    import sys, time
    from pathlib import Path
    from trainer.run.heartbeat import Heartbeat
    def waits_for_ever():
        sum(range(10**8))
    heart = Heartbeat(Path(sys.argv[1]), rank=0, step_timeout_s=0.3)
    heart.beat("step", update=1)
    waits_for_ever()
    heart.close()
"""


def test_a_stage_that_outlives_its_deadline_leaves_its_stacks(tmp_path):
    subprocess.run([forked_python(), "-c", textwrap.dedent(HANGS), str(tmp_path)], check=True)
    assert "waits_for_ever" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()


def test_a_stage_that_outlives_its_deadline_ends_the_run_if_asked(tmp_path):
    ends = textwrap.dedent(HANGS).replace("step_timeout_s=0.3", "step_timeout_s=1.0, ends_run=True")
    ends = ends.replace("sum(range(10**8))", "time.sleep(100)")
    done = subprocess.run([forked_python(), "-c", ends, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "waits_for_ever" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()
    assert "step of update 1 has taken 1 s, so the run ends" in done.stderr
    assert "resume=auto" in done.stderr


def test_a_stage_that_holds_the_interpreter_ends_too(tmp_path):
    ends = textwrap.dedent(HANGS).replace("step_timeout_s=0.3", "step_timeout_s=0.3, ends_run=True")
    ends = ends.replace("10**8", "10**14")  # in C, for days
    done = subprocess.run([forked_python(), "-c", ends, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "waits_for_ever" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()


def test_wall_time():
    assert not WallTime(0.0).is_over
    assert not WallTime(1.0).is_over
    assert WallTime(1e-12).is_over
