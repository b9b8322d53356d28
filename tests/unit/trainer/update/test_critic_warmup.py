"""Critic warm-up: the first updates train the critic only, and the policy keeps its bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.critic_credit import critic_targets
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.critic import ActorCritic, Critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.components.component import TokenSet
from lockstep.trainer.update.components.demonstrations_component import demonstrations_component
from lockstep.trainer.update.entropy_control import EntropyControl
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.fixtures.models import tiny_qwen3

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1)


class TrainingRank(FakeRank):
    """A rank that changes its parameters, and keeps the largest gradient of the policy in each step."""

    def __init__(self, module: ActorCritic) -> None:
        super().__init__(module, make_optimizer(module, OPTIMIZER))
        self.of_policy: list[float] = []

    def step(self, lr: float, grad_norm: float, *, critic_only: bool = False) -> None:
        assert isinstance(self.module, ActorCritic)
        found = [float(p.grad.abs().max()) for p in self.module.policy.parameters() if p.grad is not None]
        self.of_policy.append(max(found))
        Distributed.step(self, lr, grad_norm, critic_only=critic_only)


def actor_critic() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(Policy(tiny_qwen3(tied=True)), Critic(tiny_qwen3(tied=True).get_decoder()))


def batch() -> StepBatch:
    call = EngineCall(
        prompt_ids=(5, 6), sampled_ids=(7, 8, 9), sampled_logprobs=(-5.0,) * 3, finish_reason=FinishReason.STOP
    )
    rollouts = [Rollout(rollout_id=i, group_id=i, calls=(call,), reward=float(i)) for i in range(2)]
    return StepBatch.of(rollouts, mask_truncated=False)


def parameters(module: torch.nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def is_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_only_the_critic_changes_until_the_warmup_is_over() -> None:
    """With weight decay, an entropy bonus and a KL term, all of which would move the policy."""
    algorithm = AlgorithmConfig(
        advantage="gae",
        critic_warmup=2,
        kl_coef=0.1,
        kl_place="loss",
        entropy_target=100.0,
        epochs=4,
        critic_lambda=1.0,
    )
    module, step = actor_critic(), batch()
    rank = TrainingRank(module)
    updater = Updater(module, rank, Config(algorithm=algorithm, optimizer=OPTIMIZER))
    updater.entropy = EntropyControl(coef=0.01, entropy=1.0)
    old_N = torch.full((6,), -5.0)
    logprobs = Logprobs(old=Recomputed(old_N), ref_N=old_N - 0.5, values_N=torch.zeros(6))
    correction = StepCorrection.of(step, logprobs.old, CorrectionConfig(mode="off"))
    targets = critic_targets(step, logprobs, correction, algorithm, kl_coef=0.1).targets
    first = parameters(module.policy)
    seen = []

    def watched(*args: object, **kwargs: object) -> dict[str, float]:
        before = parameters(module.policy), parameters(module.critic)
        report = Updater.optimizer_step(updater, *args, **kwargs)  # type: ignore[arg-type]
        after = parameters(module.policy), parameters(module.critic)
        seen.append((is_equal(before[0], after[0]), is_equal(before[1], after[1])))
        return report

    updater.optimizer_step = watched  # type: ignore[method-assign]
    updater.update(step, targets)
    assert seen == [(True, False), (True, False), (False, False), (False, False)]
    assert rank.of_policy[:2] == [0.0, 0.0]
    assert min(rank.of_policy[2:]) > 0
    assert not is_equal(first, parameters(module.policy))
    grown = algorithm.entropy_coef_step * 2
    assert abs(updater.entropy.coef - 0.01 - grown) < 1e-9, "the controller waits for the policy"


@pytest.mark.parametrize("name", ["adamw", "adamw_tf", "muon", "sgd"])
def test_the_first_update_after_the_warmup_is_the_first_one_for_the_optimizer(name: str) -> None:
    moved = {warmup: after_warmup(OptimizerConfig(name=name, lr=1e-3, weight_decay=0.1), warmup) for warmup in (0, 20)}
    assert moved[0].norm() > 0
    assert torch.equal(moved[20], moved[0])


def after_warmup(settings: OptimizerConfig, warmup: int) -> Tensor:
    """Return the movement of the policy in its first update, with the same gradients after any number of others."""
    module = actor_critic()
    rank = FakeRank(module, make_optimizer(module, settings))
    first = torch.cat([tensor.flatten() for tensor in parameters(module.policy)])
    for update in range(warmup + 1):
        generator = torch.Generator().manual_seed(5)
        for parameter in module.policy.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = drawn if update == warmup else torch.zeros_like(parameter)
        for parameter in module.critic.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        Distributed.step(rank, 1e-3, 1.0, critic_only=update < warmup)
    return torch.cat([tensor.flatten() for tensor in parameters(module.policy)]) - first


def test_norms_of_the_critic_alone_are_no_baseline_for_both() -> None:
    """Also not after a resumption in the warm-up, whose checkpoint brings its norms."""
    settings = OptimizerConfig(lr=1e-3, spike="skip", spike_factor=2.0, max_skipped_updates=9)
    algorithm = AlgorithmConfig(advantage="gae", critic_warmup=2, epochs=4)
    module, step = actor_critic(), batch()
    updater = Updater(module, TrainingRank(module), Config(algorithm=algorithm, optimizer=settings))
    old_N = torch.full((6,), -5.0)
    logprobs = Logprobs(old=Recomputed(old_N), values_N=torch.zeros(6))
    correction = StepCorrection.of(step, logprobs.old, CorrectionConfig(mode="off"))
    targets = critic_targets(step, logprobs, correction, algorithm, kl_coef=0.0).targets
    updater.num_updates = 1
    updater.guard.norms.extend([1e-9] * 20)
    updater.update(step, targets)
    assert (updater.num_updates, updater.guard.skipped) == (1, 4), "in the warm-up such norms are spikes"
    updater.num_updates = 2
    updater.update(step, targets)
    assert (updater.num_updates, updater.guard.skipped) == (6, 4)
    assert len(updater.guard.norms) == 4, "the later updates keep them"


def test_a_resumed_run_continues_its_warmup() -> None:
    config = Config(algorithm=AlgorithmConfig(advantage="gae", critic_warmup=5))
    assert [config.plan.trains_critic_alone(update) for update in (0, 4, 5)] == [True, True, False]


def test_without_a_critic_there_is_no_warmup() -> None:
    assert not Config(algorithm=AlgorithmConfig(critic_warmup=5)).plan.trains_critic_alone(0)


class Given:
    """Rows beside the rollouts, of which the number of draws counts."""

    name = "given"
    cursor = 0

    def metrics(self) -> dict[str, float]:
        return {}

    def draw(self, stage: object) -> StepBatch:
        self.cursor += 1
        return batch()

    def token_set(self, rows: StepBatch, *, update: int, routers: object) -> TokenSet:
        term = demonstrations_component(self.name, weight=1.0, num_tokens=rows.layout.num_tokens)
        return TokenSet(batch=rows, rows=range(len(rows.rows)), terms=[term])


def test_rows_beside_the_rollouts_are_not_drawn_until_the_warmup_is_over() -> None:
    """They train the policy; drawn and not trained they would be lost."""
    algorithm, given = AlgorithmConfig(advantage="gae", critic_warmup=2, epochs=3), Given()
    module, step = actor_critic(), batch()
    updater = Updater(module, TrainingRank(module), Config(algorithm=algorithm, optimizer=OPTIMIZER), given=[given])
    logprobs = Logprobs(old=Recomputed(torch.full((6,), -5.0)), values_N=torch.zeros(6))
    correction = StepCorrection.of(step, logprobs.old, CorrectionConfig(mode="off"))
    updater.update(step, critic_targets(step, logprobs, correction, algorithm, kl_coef=0.0).targets)
    assert (updater.num_updates, given.cursor) == (3, 1)
