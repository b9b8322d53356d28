"""Saved rollouts: which file is read, how much of it, and the settings of its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.lab.diagnosis.saved import MAX_ROLLOUTS, find_rollouts, load_rollouts, run_overrides
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.saved_rollouts import write_rollouts
from tests.fixtures.made_up_model import two_turns


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "it's a run"
    (directory / "rollouts").mkdir(parents=True)
    for step in (2, 1):
        write_rollouts(directory / "rollouts" / f"step-{step:06d}.jsonl", [two_turns(i) for i in range(5)])
    (directory / "config.yaml").write_text(
        "model: {path: models/it's mine, trust_remote_code: false}\nrollout: {temperature: 0.7}\nseed: 3\n"
    )
    return directory


def test_a_run_directory_means_its_first_step(run: Path):
    expected = run / "rollouts" / "step-000001.jsonl"
    assert find_rollouts(run) == find_rollouts(run / "rollouts") == find_rollouts(expected) == expected


def test_a_directory_without_rollouts_is_refused_with_advice(tmp_path: Path):
    with pytest.raises(ConfigError, match="save_rollouts=true"):
        find_rollouts(tmp_path)


def test_the_first_64_rollouts_are_read_as_they_were_written(tmp_path: Path):
    path = tmp_path / "many.jsonl"
    write_rollouts(path, [two_turns(i) for i in range(MAX_ROLLOUTS + 1)])
    loaded = load_rollouts(path)
    assert [rollout.rollout_id for rollout in loaded] == list(range(64))
    assert loaded[0].calls == two_turns(0).calls


def test_an_empty_file_is_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="empty"):
        load_rollouts(tmp_path / "empty.jsonl")


def test_settings_come_from_the_run_unless_the_user_gave_them(run: Path):
    path = find_rollouts(run)
    assert run_overrides(path, []) == [
        'model.path="models/it\'s mine"',
        "rollout.temperature=0.7",
        "data.heldout_path=null",
        "eval.every=0",
    ]
    assert run_overrides(path, ["rollout.temperature=1.0", "model.path=x", "eval.every=0"]) == [
        "data.heldout_path=null",
    ]


@pytest.mark.parametrize("text", ["model: {path: '${oc.env:HOME}'}", "- 1", "model: {path: {a: b}}"])
def test_settings_that_are_no_plain_values_are_refused(run: Path, text: str):
    (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        run_overrides(find_rollouts(run), [])


def test_code_of_the_model_is_never_trusted_because_the_run_did(run: Path):
    (run / "config.yaml").write_text("model: {path: a, trust_remote_code: true}")
    assert not any("trust" in override for override in run_overrides(find_rollouts(run), []))


def test_a_file_outside_a_run_sets_nothing(tmp_path: Path):
    assert run_overrides(tmp_path / "step-000001.jsonl", []) == []


def test_hydra_reads_the_overrides_back_unchanged(run: Path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = [
        override.value() for override in OverridesParser.create().parse_overrides(run_overrides(find_rollouts(run), []))
    ]
    assert values == ["models/it's mine", 0.7, None, 0]
