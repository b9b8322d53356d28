"""Model of a checkpoint as a directory: its weights, those of a policy beside a critic, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.checkpoint import checkpoint
from lockstep.trainer.checkpoint.checkpoint import TrainerState
from lockstep.trainer.checkpoint.export import export_model
from lockstep.trainer.config.groups.model_settings import ModelConfig
from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import perturb, save_tiny_model, tiny_qwen3


class Policy(nn.Module):
    """Names of parameters as `Policy` and `ActorCritic` have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class ActorCritic(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.value_head = policy, nn.Linear(2, 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_critic", [False, True])
def test_the_weights_of_a_checkpoint_are_exported(tmp_path: Path, tied: bool, has_critic: bool) -> None:
    base = save_tiny_model(tmp_path / "base", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(base)
    perturb(model, seed=1)
    module = ActorCritic(Policy(model)) if has_critic else Policy(model)
    state = TrainerState(step=3, update=3, data_cursor=0)
    place = checkpoint.save(tmp_path / "checkpoints", state, FakeRank(module), keep=1)
    export_model(place, ModelConfig(path=str(base)), tmp_path / "exported", has_critic=has_critic)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", tied=False)
    module = Policy(tiny_qwen3(tied=False, vocab_size=64))
    state = TrainerState(step=3, update=3, data_cursor=0)
    place = checkpoint.save(tmp_path / "checkpoints", state, FakeRank(module), keep=1)
    with pytest.raises(CheckpointError, match=r"step-3 does not fit .*base: "):
        export_model(place, ModelConfig(path=str(base)), tmp_path / "exported", has_critic=False)
