"""Saved critics: transformers reads their values, and another run continues from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GraniteConfig,
    GraniteForCausalLM,
)

from lockstep.trainer.batch.packing import collate
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.critic import ActorCritic, Critic, save_critic
from lockstep.trainer.model.policy import Policy
from tests.fixtures.distributed import FakeRank
from tests.unit.trainer.model.test_critic import MODELS, ROWS, give_weight


def values_of(module: ActorCritic) -> torch.Tensor:
    with torch.no_grad():
        return module(collate(ROWS, range(len(ROWS))), with_values=True)[2]


@pytest.mark.parametrize("kind", ["separate", "shared", "shared with adapters"])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_and_another_run_read_the_saved_values(name: str, kind: str, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path / "policy")
    policy = Policy.from_pretrained(tmp_path / "policy", lora=LoraConfig(rank=2) if "adapters" in kind else None)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.02
    critic = Critic.from_pretrained(tmp_path / "policy")
    module = ActorCritic(policy, critic) if kind == "separate" else ActorCritic.shared(policy)
    give_weight(module)
    expected = values_of(module)
    assert float(expected.std()) > 0.1

    assert save_critic(module, tmp_path / "critic", FakeRank())
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    assert loaded.config.num_labels == 1
    read = []
    for row in ROWS:
        with torch.no_grad():
            logits = loaded(torch.from_numpy(row.ids)[None]).logits[0, :, 0]
        read.append(logits[np.flatnonzero(row.loss_mask) - 1])
    torch.testing.assert_close(torch.cat(read), expected, rtol=1e-4, atol=1e-5)

    again = ActorCritic(policy, Critic.from_pretrained(tmp_path / "critic"))
    torch.testing.assert_close(values_of(again), expected, rtol=1e-4, atol=1e-5)


def test_a_reward_model_provides_its_decoder_but_not_its_head(tmp_path: Path) -> None:
    MODELS["qwen3"]().save_pretrained(tmp_path / "policy")
    reward_model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "policy", num_labels=1)
    reward_model.save_pretrained(tmp_path / "reward")
    module = ActorCritic(Policy.from_pretrained(tmp_path / "policy"), Critic.from_pretrained(tmp_path / "reward"))
    assert not values_of(module).any(), "V = 0 at step 0"


def test_an_architecture_without_a_token_classifier_writes_nothing(tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=512, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    module = ActorCritic.shared(Policy(GraniteForCausalLM(config)))
    assert not save_critic(module, tmp_path / "critic", FakeRank())
    assert not (tmp_path / "critic").exists()
