"""Isolation of the rows of a pack, checked at the start of a run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.model.critic import ActorCritic
from lockstep.trainer.model.layers import recurrent
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks import isolation
from tests.fixtures.families import FAMILIES, save_family
from tests.fixtures.models import VOCAB_SIZE

RECURRENT = ("falcon_h1", "nemotron_h", "granite_hybrid", "qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe")
F32 = torch.float32


def logprobs(policy: Policy) -> isolation.Score:
    return lambda packed: policy(packed, with_entropy=False)[0][None]


def check(score: isolation.Score, dtype: torch.dtype = F32) -> None:
    isolation.check(score, vocab_size=VOCAB_SIZE, length=100, name="Model", dtype=dtype, device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_every_family_are_isolated(family: str, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(save_family(family, tmp_path))
    assert isolation.leak(logprobs(policy), vocab_size=VOCAB_SIZE, length=100, device="cpu") < 1e-5
    assert any(recurrent.recurrent_layers(policy)) == (family in RECURRENT)


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("family", RECURRENT)
def test_a_model_whose_layers_carry_state_to_the_next_row_is_refused(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(family, tmp_path)
    check(logprobs(Policy.from_pretrained(path, dtype=dtype)), dtype)
    monkeypatch.setattr(recurrent, "row_arguments", lambda packed: {})
    with pytest.raises(ConfigError, match=r"rows of a pack change each other's scores by .* docs/models\.md"):
        check(logprobs(Policy.from_pretrained(path, dtype=dtype)), dtype)


def test_values_that_depend_on_other_rows_are_found(tmp_path: Path) -> None:
    policy = Policy.from_pretrained(save_family("qwen3", tmp_path))
    actor_critic = ActorCritic.shared(policy)

    def score(packed: PackedBatch) -> torch.Tensor:
        logp_T, _, values_T = actor_critic(packed, with_values=True)
        return torch.stack([logp_T, values_T + is_leaking * packed.ids.float().mean()])

    is_leaking = 0.0
    check(score)
    is_leaking = 1.0
    with pytest.raises(ConfigError, match="each other's scores"):
        check(score)


def test_a_score_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="by nan on average"):
        check(lambda packed: torch.full((1, len(packed.target_ids_T)), torch.nan))


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_gradient_checkpointing_recomputes_isolated_rows(family: str, tmp_path: Path) -> None:
    path = save_family(family, tmp_path)
    gradients = []
    for checkpointing in (False, True):
        policy = Policy.from_pretrained(path, gradient_checkpointing=checkpointing)
        packed = isolation.collate([isolation.whole_row(row) for row in (isolation.FIRST, isolation.SECOND)], [0, 1])
        policy(packed)[0].sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_a_copy_of_a_model_computes_with_its_own_weights(tmp_path: Path) -> None:
    """As the reference does, whose weights stay while the policy's change."""
    policy = Policy.from_pretrained(save_family("qwen3_5", tmp_path))
    duplicate = copy.deepcopy(policy)
    packed = isolation.collate([isolation.whole_row(isolation.FIRST)], [0])
    before = policy(packed)[0].detach()
    with torch.no_grad():
        for layer in recurrent.recurrent_layers(policy):
            for parameter in layer.parameters():
                parameter.mul_(1.5)
    torch.testing.assert_close(duplicate(packed)[0], before)
    assert not torch.allclose(policy(packed)[0], before)
