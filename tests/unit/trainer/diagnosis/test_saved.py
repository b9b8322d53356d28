"""Saved rollouts: which file, how many, and the settings of the run they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.saved_rollouts import write_rollouts
from tests.unit.trainer.diagnosis.test_diagnosis import two_turns
from trainer.diagnosis.saved import find_rollouts, load_rollouts, run_overrides


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


def test_a_run_stands_for_its_first_step(run: Path):
    expected = run / "rollouts" / "step-000001.jsonl"
    assert find_rollouts(run) == find_rollouts(run / "rollouts") == find_rollouts(expected) == expected


def test_a_place_without_rollouts_is_refused_with_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match="save_rollouts=true"):
        find_rollouts(tmp_path)


def test_at_most_so_many_are_read_and_they_are_what_was_written(run: Path):
    loaded = load_rollouts(find_rollouts(run), limit=3)
    assert [rollout.rollout_id for rollout in loaded] == [0, 1, 2]
    assert loaded[0].calls == two_turns(0).calls


def test_an_empty_file_is_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="empty"):
        load_rollouts(tmp_path / "empty.jsonl", limit=3)


def test_settings_come_from_the_run_unless_given(run: Path):
    path = find_rollouts(run)
    assert run_overrides(path, []) == [
        "model.path='models/it\\'s mine'",
        "model.trust_remote_code=false",
        "rollout.temperature=0.7",
        "data.heldout_path=null",
        "eval.every=0",
    ]
    assert run_overrides(path, ["rollout.temperature=1.0", "model.path=x", "eval.every=0"]) == [
        "model.trust_remote_code=false",
        "data.heldout_path=null",
    ]


def test_a_file_outside_of_a_run_brings_no_settings(tmp_path: Path):
    assert run_overrides(tmp_path / "step-000001.jsonl", []) == []


def test_hydra_reads_the_overrides_back_as_they_were(run: Path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    values = [
        override.value() for override in OverridesParser.create().parse_overrides(run_overrides(find_rollouts(run), []))
    ]
    assert values == ["models/it's mine", False, 0.7, None, 0]
