"""Presets and choices: every name that a setting offers exists, and the page on algorithms lists every preset."""

from __future__ import annotations

import re

import pytest
import torch
import yaml

from rollout.records import EngineCall, FinishReason, Rollout
from tests.fixtures.paths import ROOT
from trainer.batch.step_batch import decode, encode
from trainer.config import schema as config
from trainer.config.schema import AlgorithmConfig
from trainer.credit.targets import ADVANTAGE_SETTINGS, rollout_advantages
from trainer.model.decoder import AUTO
from trainer.model.packed_attention import PACKED_ROWS
from trainer.objective.advantages import ADVANTAGES
from trainer.objective.correction import CORRECTION_MODES
from trainer.objective.kl import KL_TERMS
from trainer.objective.loss_normalization import NORMALIZERS
from trainer.objective.losses import POLICY_LOSSES
from trainer.objective.rejection import REJECTION_CRITERIA
from trainer.update.updater import LOSS_SETTINGS, policy_loss

PRESETS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / "configs/algorithm").glob("*.yaml")}
GROUP_BASED = {name: values for name, values in PRESETS.items() if values["advantage"] in ADVANTAGES}


def test_choices_of_settings_are_what_the_code_knows() -> None:
    assert set(ADVANTAGE_SETTINGS) == set(ADVANTAGES)
    assert set(ADVANTAGES) <= set(config.ADVANTAGES)  # gae is PPO's own
    assert set(LOSS_SETTINGS) == set(POLICY_LOSSES) == set(config.LOSSES)
    assert set(config.NORMALIZERS) == set(NORMALIZERS)
    assert set(config.KL_ESTIMATORS) == set(KL_TERMS)
    assert set(config.REJECTIONS) == set(REJECTION_CRITERIA)
    assert {AUTO, PACKED_ROWS} < set(config.ATTENTIONS)
    modes = config.CorrectionConfig.__dataclass_fields__["mode"].metadata["choices"]
    assert set(modes) == set(CORRECTION_MODES)


def test_the_page_on_algorithms_lists_every_preset() -> None:
    page = (ROOT / "docs/algorithms.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`[^|]*\| [^|]+\| [^|]+\| [^|]+\| `", page, flags=re.M)) == set(GROUP_BASED)


def test_a_preset_says_its_own_name_and_its_paper() -> None:
    for name, values in PRESETS.items():
        assert values["name"] == name
        assert (ROOT / f"configs/algorithm/{name}.yaml").read_text().startswith("#")


@pytest.mark.parametrize("preset", sorted(GROUP_BASED))
def test_every_preset_has_an_advantage_and_a_loss(preset: str) -> None:
    settings = AlgorithmConfig(**PRESETS[preset])
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-1.0,), finish_reason=FinishReason.STOP)
    rollouts = [Rollout(rollout_id=i, group_id=i // 2, calls=(call,), reward=float(i)) for i in range(4)]
    batch = decode([encode(rollouts, mask_truncated=False, greedy_rewards={0: 0.5, 1: 0.5})])
    advantages_S, metrics = rollout_advantages(batch, settings)
    assert bool(torch.isfinite(advantages_S).all())
    assert bool((advantages_S != 0).any())
    assert metrics["reward/zero_std_fraction"] == 0.0
    policy_loss(settings)


def test_settings_of_the_advantage_reach_it() -> None:
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-1.0,), finish_reason=FinishReason.STOP)
    rollouts = [Rollout(rollout_id=i, group_id=0, calls=(call,), reward=float(i)) for i in range(3)]
    batch = decode([encode(rollouts, mask_truncated=False)])

    def of(**settings: object) -> list[float]:
        return rollout_advantages(batch, AlgorithmConfig(**settings)).advantages_S.tolist()  # type: ignore[arg-type]

    assert of() == pytest.approx([-1, 0, 1], abs=1e-5)
    assert of(advantage_ddof=0) == pytest.approx([-(1.5**0.5), 0, 1.5**0.5], abs=1e-5)
    assert of(advantage_std=False) == pytest.approx([-1, 0, 1], abs=1e-12)
    assert of(advantage_eps=1.0) == pytest.approx([-0.5, 0, 0.5])
    assert of(advantage="grpo_passk", advantage_std=False) == pytest.approx([0, 0, 1])
