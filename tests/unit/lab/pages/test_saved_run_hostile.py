"""Run directories with any content: each tool reads them or refuses them with a typed error, and runs none of their
code."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.lab.pages.run_report import facts, report
from lockstep.lab.pages.saved_run import SavedRun
from lockstep.lab.replay import settings_of
from lockstep.rollout.errors import ConfigError, DataError, LockstepError
from lockstep.rollout.saved_rollouts import check_ids, to_json
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.observe.metrics_log import read_metrics
from tests.fixtures.mutations import JSON, mutated
from tests.unit.lab.pages.test_run_report import line, rollout, write_run
from tests.unit.lab.pages.test_saved_run_damaged import tool
from tests.unit.project.test_security import evil_model  # noqa: F401  # a fixture

pytestmark = pytest.mark.long

CONFIG = plain(Config())
PROVENANCE = {
    "code": {"commit": "abc", "is_changed": True},
    "packages": {},
    "files": {"hashes": {}, "changes": {"my/rewards.py": 14}},
}
MISMATCH = "rollout_correction/logp_diff_abs_max"
LINE = line(1, **{"eval/reward_mean": 0.5, "eval/x/reward_mean": 0.5})
ROLLOUT = json.loads(json.dumps(to_json(rollout(0, 1.0))))


def shown(run: Path) -> None:
    """Read a run and render it as the tools do."""
    saved = SavedRun.read(run)
    report(saved)
    for one in saved.rollouts:
        RunConsole(enabled=False, total_updates=0).sample(one)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_run_directory_is_shown_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    run: Path = tmp_path_factory.mktemp("run") / "run"
    write_run(run, [line(1)], [])
    part = data.draw(st.sampled_from(["config", "provenance", "metrics", "rollout"]))
    config, provenance, metrics, one = CONFIG, PROVENANCE, LINE, ROLLOUT
    if part == "config":
        section = data.draw(st.sampled_from(["correction", "model", "rollout", "data"]))
        config = {**CONFIG, section: data.draw(mutated(CONFIG[section]))}
    elif part == "provenance":
        provenance = data.draw(mutated(PROVENANCE) | JSON)
    elif part == "metrics":
        metrics = data.draw(mutated(LINE) | JSON)
    else:
        one = data.draw(mutated(ROLLOUT))
    (run / "config.yaml").write_text(yaml.safe_dump(config), errors="replace")
    (run / "provenance.json").write_text(json.dumps(provenance))
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n" + json.dumps(line(2)))
    (run / "rollouts").mkdir(exist_ok=True)
    (run / "rollouts" / "step-000001.jsonl").write_text(json.dumps(one))
    with contextlib.suppress(LockstepError):
        shown(run)


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("config.yaml", "a: [", ConfigError),
        ("config.yaml", "- 1", ConfigError),
        ("config.yaml", "model: {dtype: int7}", ConfigError),
        ("config.yaml", "correction: {alarm_kl: x}", ConfigError),
        ("provenance.json", "[]", DataError),
        ("provenance.json", '{"code": []}', DataError),
        ("provenance.json", '{"code": {"commit": 5}}', DataError),
        ("provenance.json", "[" * 100_000, DataError),
        ("provenance.json", '{"files": {"changes": {"rewards.py": "x"}}}', DataError),
        ("provenance.json", '{"files": {"changes": []}}', DataError),
        ("metrics.jsonl", '{"step": "a"}\n{"step": 1}', DataError),
        ("metrics.jsonl", '{"step": 1, "reward/mean": "a"}\n{"step": 1}', DataError),
        ("metrics.jsonl", '{"step": 1, "reward/mean": 1' + "0" * 400 + '}\n{"step": 1}', DataError),
        ("metrics.jsonl", '{"step": true}\n{"step": 1}', DataError),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str, kind: type[Exception]) -> None:
    run = write_run(tmp_path / "run", [line(1)], [])
    (run / file).write_text(text)
    with pytest.raises(kind, match=file.replace(".", r"\.")):
        shown(run)


def test_a_run_of_another_version_without_the_alarm_settings_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(1, **{"rollout_correction/kl": 0.5})], [])
    (run / "config.yaml").write_text("seed: 1\n")
    assert len(SavedRun.read(run).alarms()) == 1
    report(SavedRun.read(run))


def test_metrics_that_are_not_finite_are_absent(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": NaN, "b": -Infinity, "c": null, "d": 1e999}\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": None, "d": None}]


@pytest.mark.parametrize("name", ["step-.jsonl", "step-x.jsonl", "step-zzz-9.jsonl", "step-²²²²²².jsonl"])
def test_a_file_that_no_run_writes_is_not_read(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [line(1)], [rollout(0, 1.0)])
    (run / "rollouts" / "step-000001.jsonl").rename(run / "rollouts" / name)
    assert SavedRun.read(run).rollouts == []


def test_the_name_of_a_run_is_not_a_formula(tmp_path: Path) -> None:
    status, said = tool("scripts/plot.py", write_run(tmp_path / "$x_{", [line(1)], []), "--metrics", "reward/mean")
    assert status == 0, said


def test_the_labels_of_the_curves_are_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(update, **{MISMATCH: 10.0**-update}) for update in (2, 6)], [])
    status, said = tool("scripts/plot.py", run, "--out", tmp_path / "curves.svg")
    assert status == 0, said
    drawn = (tmp_path / "curves.svg").read_text()  # its comments have the texts
    assert "<!-- 1e-06 -->" in drawn
    assert "mathdefault" not in drawn


def test_tokens_are_shown_without_code_of_the_model(tmp_path: Path, evil_model: Path) -> None:  # noqa: F811
    run = write_run(tmp_path / "run", [line(1)], [rollout(0, 1.0)])
    evil_model.rename(run / "model")
    status, said = tool("scripts/inspect_run.py", run, "--tokens")
    assert not (tmp_path / "fired").exists()
    assert "[y/N]" not in said
    assert (status, "without its own code" in said) in ((0, False), (1, True))
    huge = json.dumps({**ROLLOUT, "calls": [{**ROLLOUT["calls"][0], "sampled_ids": [2**60, 3]}]})
    (run / "rollouts" / "step-000001.jsonl").write_text(huge)
    status, said = tool("scripts/inspect_run.py", run, "--tokens")
    assert str(2**60) in said or status == 1
    for damaged in ("[1", '{"model": 3}'):
        (run / "model" / "tokenizer.json").write_text(damaged)
        status, said = tool("scripts/inspect_run.py", run, "--tokens")
        assert status == 1
        assert "without its own code" in said


@pytest.mark.parametrize(
    ("script", "default"),
    [("report.py", "report.html"), ("plot.py", "curves.png"), ("report.py", "report.html.partial")],
)
def test_a_link_in_a_run_leads_no_page_to_another_file(tmp_path: Path, script: str, default: str) -> None:
    run = write_run(tmp_path / "run", [line(1)], [])
    (tmp_path / "precious").write_text("mine")
    (run / default).symlink_to(tmp_path / "precious")
    status, said = tool(f"scripts/{script}", run)
    assert (tmp_path / "precious").read_text() == "mine"
    assert (status, "is a link" in said) == ((0, False) if default.endswith("partial") else (1, True))


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "provenance.json", "rollouts/step-000009.jsonl", "report.html"]
)
def test_a_pipe_in_a_run_blocks_no_tool(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", [line(1)], [rollout(0, 1.0)])
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    tool("scripts/report.py", run)
    if name == "config.yaml":
        with pytest.raises(ConfigError, match="not a regular file"):
            settings_of(run, [], sample=False)
    if name.startswith("rollouts"):
        assert tool("scripts/inspect_run.py", run)[0] == 0


def test_a_file_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", [line(1)], [])
    (run / "rollouts").mkdir(exist_ok=True)
    (run / "rollouts" / "step-000009.jsonl").symlink_to("/dev/zero")
    assert "not a regular file" in SavedRun.read(run).passed_over[0]
    sparse = run / "rollouts" / "step-000008.jsonl"
    with sparse.open("w") as file:
        file.truncate(2**32)
    assert "a line of more than" in SavedRun.read(run).passed_over[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"time/step": 1e300},
        {"time/step": 1e99, "reward/mean": 1e99, "reward/std": 1e99},
        {"time/step": -1e308, "reward/mean": -1e308, "rollout_correction/kl": 5e-324},
        {"reward/mean": 5e-324},
        {"rollout/sampled_tokens": 1e308, "time/step": 5e-324},
    ],
)
def test_extreme_numbers_have_a_report(tmp_path: Path, changes: dict[str, float]) -> None:
    run = write_run(tmp_path / "run", [line(1, **changes), line(2), line(3, **changes)], [])
    report(SavedRun.read(run))


@pytest.mark.parametrize("step", ["-1", "0.5", "1e300", "1" + "0" * 30])
def test_a_step_other_than_an_update_is_refused(tmp_path: Path, step: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n{{"step": 1}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:1 .*expected the number of an update"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_ids_without_an_embedding_are_refused() -> None:
    made = rollout(0, 1.0)
    largest = max(token for call in made.calls for token in (*call.prompt_ids, *call.sampled_ids))
    check_ids([made], vocab_size=largest + 1)
    with pytest.raises(DataError, match=f"rollout 0 has the token id {largest}, but the model has {largest} ids"):
        check_ids([made], vocab_size=largest)


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(1)], [])
    for out in ("/proc/none/x.png", tmp_path / "x.exe"):
        assert tool("scripts/plot.py", run, "--out", out)[0] == 1


def test_a_file_that_was_changed_between_processes_of_a_run_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(1)], [])
    (run / "provenance.json").write_text(json.dumps(PROVENANCE))
    assert "rewards.py changed after update 14" in list(facts(SavedRun.read(run)))
