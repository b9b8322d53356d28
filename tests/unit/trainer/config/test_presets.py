"""Presets and choices of settings name existing losses, advantages and attentions."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import yaml

from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.model_settings import ATTENTIONS
from lockstep.trainer.credit.targets import rollout_advantages
from lockstep.trainer.model.decoder import AUTO
from lockstep.trainer.model.layers.packed_attention import PACKED_ROWS
from lockstep.trainer.objective.declare import ADVANTAGES, POLICY_LOSSES
from tests.fixtures.paths import ROOT

PRESETS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / "configs/algorithm").glob("*.yaml")}
OF_ROLLOUTS = {
    name: values
    for name, values in PRESETS.items()
    if values.get("trains_on") != "demonstrations"
    and not ADVANTAGES[values["advantage"]].needs_critic
    and not ADVANTAGES[values["advantage"]].needs_states
}


def test_choices_of_the_attention_include_those_of_the_decoder() -> None:
    assert {AUTO, PACKED_ROWS} < set(ATTENTIONS)


def test_every_setting_of_a_loss_or_advantage_is_a_setting_of_the_algorithm() -> None:
    names = {field.name for field in fields(AlgorithmConfig)}
    for declared in (*POLICY_LOSSES.values(), *ADVANTAGES.values()):
        assert set(declared.arguments) <= names


def test_every_preset_has_its_name_and_a_header() -> None:
    for name, values in PRESETS.items():
        assert values["name"] == name
        assert (ROOT / f"configs/algorithm/{name}.yaml").read_text().startswith("#")


@pytest.mark.parametrize("preset", sorted(OF_ROLLOUTS))
def test_every_preset_gives_finite_advantages_and_has_a_loss(preset: str) -> None:
    settings = AlgorithmConfig(**PRESETS[preset])
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-1.0,), finish_reason=FinishReason.STOP)
    rollouts = [
        Rollout(rollout_id=i, group_id=i // 2, calls=(call,), reward=float(i), rewards={"answer": float(i)})
        for i in range(4)
    ]
    batch = StepBatch.of(rollouts, mask_truncated=False, greedy_rewards={0: 0.5, 1: 0.5})
    advantages_S, metrics = rollout_advantages(batch, settings)
    assert bool(torch.isfinite(advantages_S).all())
    assert bool((advantages_S != 0).any())
    assert metrics["reward/zero_std_fraction"] == 0.0
    assert settings.loss in POLICY_LOSSES


def test_settings_reach_the_advantage() -> None:
    call = EngineCall(prompt_ids=(1,), sampled_ids=(2,), sampled_logprobs=(-1.0,), finish_reason=FinishReason.STOP)
    rollouts = [Rollout(rollout_id=i, group_id=0, calls=(call,), reward=float(i)) for i in range(3)]
    batch = StepBatch.of(rollouts, mask_truncated=False)

    def of(**settings: object) -> list[float]:
        return rollout_advantages(batch, AlgorithmConfig(**settings)).advantages_S.tolist()  # type: ignore[arg-type]

    assert of() == pytest.approx([-1, 0, 1], abs=1e-5)
    assert of(advantage_ddof=0) == pytest.approx([-(1.5**0.5), 0, 1.5**0.5], abs=1e-5)
    assert of(advantage_std=False) == pytest.approx([-1, 0, 1], abs=1e-12)
    assert of(advantage_eps=1.0) == pytest.approx([-0.5, 0, 0.5])
    assert of(advantage="grpo_passk", advantage_std=False) == pytest.approx([0, 0, 1])
