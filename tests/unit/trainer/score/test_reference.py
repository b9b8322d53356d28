"""The frozen reference: absent without a coefficient, a copy, or the policy without its adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.critic import with_critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.reference import make_reference
from lockstep.trainer.score.scorer import Scorer
from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import save_tiny_model
from tests.unit.trainer.update.test_updater import rollouts


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def batch() -> StepBatch:
    return StepBatch.of(rollouts(), mask_truncated=False)


def config(model_dir: Path, kl_coef: float) -> Config:
    made = Config(algorithm=AlgorithmConfig(kl_coef=kl_coef))
    made.model.path = str(model_dir)
    return made


def score(policy: Policy, batch: StepBatch) -> torch.Tensor:
    return Scorer(policy, FakeRank(policy), temperature=1.0, token_budget=4096).score(batch)


def move(policy: Policy) -> None:
    """Change all trained parameters, as a large optimizer step would."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05


def test_without_a_kl_coefficient_no_reference_is_loaded(model_dir: Path) -> None:
    policy = Policy.from_pretrained(model_dir)
    settings = config(Path("/nowhere"), kl_coef=0.0)
    assert make_reference(settings, FakeRank(policy), policy) is None


def test_a_copy_agrees_with_the_policy_until_an_update(model_dir: Path, batch: StepBatch) -> None:
    policy = Policy.from_pretrained(model_dir)
    reference = make_reference(config(model_dir, 0.1), FakeRank(policy), policy)
    assert reference is not None
    before = score(policy, batch)
    torch.testing.assert_close(reference.score(batch), before, rtol=0, atol=0)
    move(policy)
    assert float((score(policy, batch) - before).abs().max()) > 1e-2
    torch.testing.assert_close(reference.score(batch), before, rtol=0, atol=0)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_with_a_critic_the_kl_of_an_unchanged_policy_is_exactly_zero(
    model_dir: Path, batch: StepBatch, critic: str
) -> None:
    settings = config(model_dir, 0.1)
    settings.algorithm.advantage, settings.model.critic = "gae", critic
    module = with_critic(Policy.from_pretrained(model_dir), settings.model, has_critic=True, engine_context=None)
    distributed = FakeRank(module)
    scorer = Scorer(module, distributed, temperature=1.0, token_budget=4096)
    reference = make_reference(settings, distributed, module)
    assert reference is not None
    logp_N, values_N, _ = scorer.score_with(batch, values=True)
    torch.testing.assert_close(reference.score(batch), logp_N, rtol=0, atol=0)
    assert not values_N.any()


def test_another_model_can_be_the_reference(model_dir: Path, batch: StepBatch, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", tied=True, seed=1)
    policy = Policy.from_pretrained(model_dir)
    settings = config(model_dir, 0.1)
    settings.model.reference_path = str(other)
    reference = make_reference(settings, FakeRank(policy), policy)
    assert reference is not None
    expected = score(Policy.from_pretrained(other), batch)
    torch.testing.assert_close(reference.score(batch), expected, rtol=0, atol=0)


def test_with_adapters_the_reference_is_the_policy_without_them(model_dir: Path, batch: StepBatch) -> None:
    policy = Policy.from_pretrained(model_dir, lora=LoraConfig(rank=4))
    base = score(Policy.from_pretrained(model_dir), batch)
    settings = config(Path("/nowhere"), kl_coef=0.1)  # no copy is loaded
    reference = make_reference(settings, FakeRank(policy), policy)
    assert reference is not None
    move(policy)
    adapted = score(policy, batch)
    assert float((adapted - base).abs().max()) > 1e-2
    torch.testing.assert_close(reference.score(batch), base, rtol=0, atol=1e-5)
    torch.testing.assert_close(score(policy, batch), adapted, rtol=0, atol=0)  # the adapters are on again
    assert any(parameter.requires_grad for parameter in policy.parameters())


@pytest.fixture
def bfloat16_process() -> Iterator[Distributed]:
    """Reset Accelerate's precision, of which it keeps one per process, before and after the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Distributed.start(dtype="bfloat16", max_grad_norm=0.0)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_in_bfloat16_the_kl_of_an_unchanged_policy_is_exactly_zero(
    model_dir: Path, batch: StepBatch, bfloat16_process: Distributed
) -> None:
    """The policy computes under autocast over float32 weights, whose norms stay float32."""
    settings = config(model_dir, 0.1)
    settings.model.dtype = "bfloat16"
    policy = Policy.from_pretrained(model_dir, compute_dtype="bfloat16")
    module = bfloat16_process.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    scored = Scorer(module, bfloat16_process, temperature=1.0, token_budget=4096).score(batch)
    reference = make_reference(settings, bfloat16_process, module)
    assert reference is not None
    torch.testing.assert_close(reference.score(batch), scored, rtol=0, atol=0)
    in_float32 = score(Policy.from_pretrained(model_dir), batch)
    assert float((scored - in_float32).abs().max()) > 1e-3, "nothing was computed in bfloat16"
