"""Objectives by name: what each changes of the run, what stays, and what a run cannot show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.lab.objectives.choice import RUN, objectives_of
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text("{}")
    made = Config()
    made.model.path = str(tmp_path)
    return made


def changes(config: Config, names: list[str], corrections: list[str] | None = None) -> dict[str, tuple[str, ...]]:
    return {one.name: one.changes for one in objectives_of(config, names, corrections or [])}


def test_the_run_is_first_and_a_preset_brings_its_settings(config: Config) -> None:
    found = changes(config, ["grpo", "gspo"])
    assert list(found) == [RUN, "grpo", "gspo"]
    assert found[RUN] == found["grpo"] == ()
    assert set(found["gspo"]) == {
        "algorithm.loss=gspo", "algorithm.normalizer=grpo", "algorithm.clip_low=0.0003", "algorithm.clip_high=0.0004"
    }  # fmt: skip


def test_what_the_run_changed_of_its_own_preset_stays_unless_the_other_sets_it(config: Config) -> None:
    config.algorithm.kl_coef, config.algorithm.clip_high = 0.1, 0.5
    gspo = objectives_of(config, ["gspo"], [])[1].config.algorithm
    assert (gspo.kl_coef, gspo.clip_high) == (0.1, 4e-4)


def test_settings_of_another_preset_of_the_run_do_not_leak(config: Config) -> None:
    config.algorithm = replace(AlgorithmConfig(), name="kimi_length", advantage_std=False)
    assert objectives_of(config, ["rloo"], [])[1].config.algorithm.advantage_std is AlgorithmConfig().advantage_std


def test_every_objective_is_seen_under_every_correction(config: Config) -> None:
    found = changes(config, ["gspo", "ppo_clip"], ["off", "sequence_mask", "bypass"])
    assert list(found) == [
        RUN, "gspo off", "gspo sequence_mask", "gspo bypass",
        "ppo_clip off", "ppo_clip sequence_mask", "ppo_clip bypass",
    ]  # fmt: skip
    assert found["ppo_clip bypass"] == ("correction.mode=off", "correction.logp_old=bypass")
    assert list(changes(config, [], ["off"])) == [RUN, "run off"]


def test_stale_rollouts_are_seen_without_weights_too(config: Config) -> None:
    config.rollout.max_staleness = 2
    assert list(changes(config, [], ["off"])) == [RUN, "run off"]


def test_a_function_of_a_file_is_a_loss_or_an_advantage(config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lockstep.trainer.objective.advantages.inputs import AdvantageInputs\n"
        "def sharp(inputs):\n    return -inputs.advantages_T * inputs.logp_T\n"
        "def median(inputs: AdvantageInputs):\n    return inputs.rewards_S - inputs.rewards_S.median()\n"
    )
    found = changes(config, [f"{tmp_path}/mine.py:sharp", f"{tmp_path}/mine.py:median"])
    assert found[f"{tmp_path}/mine.py:sharp"] == (f"algorithm.loss={tmp_path}/mine.py:sharp",)
    assert found[f"{tmp_path}/mine.py:median"] == (f"algorithm.advantage={tmp_path}/mine.py:median",)


def test_settings_that_the_rollouts_already_have_are_kept_and_said(config: Config) -> None:
    dapo = objectives_of(config, ["dapo"], [])[1]
    assert dapo.config.algorithm.dynamic_sampling is False
    assert set(dapo.kept) == {"algorithm.dynamic_sampling=true", "algorithm.overlong_buffer=0.2"}


@pytest.mark.parametrize(
    ("name", "correction", "expected"),
    [
        ("gsppo", "off", "--with gsppo: expected gspo"),
        ("gspo", "tokn_mask", "--corrections tokn_mask: expected token_mask"),
        ("ppo", "off", "ppo off needs a critic.*algorithm=ppo"),
        ("opd", "off", "opd off needs a teacher's scores"),
        ("remax", "off", r"needs greedy answers, which are not saved; compare algorithm\.advantage=rloo"),
        ("sft", "off", "needs demonstrations alone"),
        ("m2po", "token_mask", "m2po token_mask: correction.mode=token_mask has no effect"),
    ],
)
def test_what_a_run_cannot_show_is_refused_by_name(config: Config, name: str, correction: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        objectives_of(config, [name], [correction])
