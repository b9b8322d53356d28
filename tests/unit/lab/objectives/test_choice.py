"""Objectives by name: what each changes of the run, what stays, and what a run cannot show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.lab.objectives.choice import RUN, Objective, objectives_of
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig


def objectives(names: list[str], corrections: list[str] | None = None, **own: object) -> list[Objective]:
    algorithm = replace(AlgorithmConfig(), **own)
    return objectives_of(algorithm, CorrectionConfig(), names=names, corrections=corrections or [])


def changes(names: list[str], corrections: list[str] | None = None) -> dict[str, tuple[str, ...]]:
    return {one.name: one.changes for one in objectives(names, corrections)}


def test_the_run_is_first_and_a_preset_brings_its_settings() -> None:
    found = changes(["grpo", "gspo"])
    assert list(found) == [RUN, "grpo", "gspo"]
    assert found[RUN] == found["grpo"] == ()
    assert set(found["gspo"]) == {
        "algorithm.loss=gspo", "algorithm.normalizer=grpo", "algorithm.clip_low=0.0003", "algorithm.clip_high=0.0004"
    }  # fmt: skip


def test_what_the_run_changed_of_its_own_preset_stays_unless_the_other_sets_it() -> None:
    gspo = objectives(["gspo"], kl_coef=0.1, clip_high=0.5)[1].algorithm
    assert (gspo.kl_coef, gspo.clip_high) == (0.1, 4e-4)


def test_settings_of_another_preset_of_the_run_do_not_leak() -> None:
    rloo = objectives(["rloo"], name="kimi_length", advantage_std=False)[1].algorithm
    assert rloo.advantage_std is AlgorithmConfig().advantage_std


def test_every_objective_is_seen_under_every_correction() -> None:
    found = changes(["gspo", "ppo_clip"], ["off", "sequence_mask", "bypass"])
    assert list(found) == [
        RUN, "gspo off", "gspo sequence_mask", "gspo bypass",
        "ppo_clip off", "ppo_clip sequence_mask", "ppo_clip bypass",
    ]  # fmt: skip
    assert found["ppo_clip bypass"] == ("correction.mode=off", "correction.logp_old=bypass")
    assert list(changes([], ["off"])) == [RUN, "run off"]


def test_a_function_of_a_file_is_a_loss_or_an_advantage(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lockstep.trainer.objective.advantages.inputs import AdvantageInputs\n"
        "def sharp(inputs):\n    return -inputs.advantages_T * inputs.logp_T\n"
        "def median(inputs: AdvantageInputs):\n    return inputs.rewards_S - inputs.rewards_S.median()\n"
    )
    found = changes([f"{tmp_path}/mine.py:sharp", f"{tmp_path}/mine.py:median"])
    assert found[f"{tmp_path}/mine.py:sharp"] == (f"algorithm.loss={tmp_path}/mine.py:sharp",)
    assert found[f"{tmp_path}/mine.py:median"] == (f"algorithm.advantage={tmp_path}/mine.py:median",)


def test_settings_that_the_rollouts_already_have_are_kept_and_said() -> None:
    dapo = objectives(["dapo"])[1]
    assert dapo.algorithm.dynamic_sampling is False
    assert set(dapo.kept) == {"algorithm.dynamic_sampling=true", "algorithm.overlong_buffer=0.2"}


@pytest.mark.parametrize(
    ("name", "correction", "expected"),
    [
        ("gsppo", "off", "--with gsppo: expected gspo"),
        ("gspo", "tokn_mask", "--corrections tokn_mask: expected token_mask"),
    ],
)
def test_an_unknown_name_is_refused_with_a_near_one(name: str, correction: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        objectives([name], [correction])
