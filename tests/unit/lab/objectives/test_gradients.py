"""Gradients of objectives on the toy step of lab/losses, in float64: identities, sums, predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.lab.losses.toy_update import tiny_model, toy_step
from lockstep.lab.objectives.gradients import Measured, SharedForward, TrialSteps, backward, dot, flat, measure, trained
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.old_policy import FromUpdate
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.components.component import TokenSet
from lockstep.trainer.update.optimizer_step import OptimizerStep
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.routers import Routers
from lockstep.trainer.update.updater import Minibatch, Updater
from tests.fixtures.distributed import FakeRank, _Accelerator

TOLERANCE = 1e-6


class Toy:
    """The toy step in float64, under any objective."""

    def __init__(self) -> None:
        self.module = Policy(tiny_model()).double()
        self.rank = FakeRank(self.module, torch.optim.SGD(self.module.parameters()))
        self.shared = SharedForward(self.module)

    def step(
        self, *, at_ratio_1: bool = False, equal_lengths: bool = False, **algorithm: Any
    ) -> tuple[StepBatch, Targets]:
        batch, targets, _ = toy_step(self.module.float(), AlgorithmConfig(**algorithm))
        self.module.double()
        if equal_lengths:  # rows of the rollouts of one turn and of nine tokens, nine tokens each
            counts = np.bincount(batch.rollout_N.numpy(), minlength=batch.num_rollouts)
            keep_N = torch.zeros(len(batch.rollout_N), dtype=torch.bool)
            for rollout in np.flatnonzero(counts >= 9):
                keep_N[(batch.rollout_N == rollout).nonzero()[:9, 0]] = True
            targets = replace(targets, correction=replace(targets.correction, keep_N=keep_N))
        if at_ratio_1:
            ones_N = torch.ones(len(batch.rollout_N))
            targets = replace(targets, old=FromUpdate(), correction=replace(targets.correction, weights_N=ones_N))
        return batch, targets

    def config(self, **algorithm: Any) -> Config:
        return Config(algorithm=AlgorithmConfig(**algorithm))

    def token_set(
        self, batch: StepBatch, targets: Targets, **algorithm: Any
    ) -> tuple[TokenSet, OptimizerStep, Updater]:
        updater = Updater(self.module, self.rank, self.config(**algorithm))
        rollouts = np.flatnonzero(np.bincount(batch.rollout_N[targets.keep_N].numpy(), minlength=batch.num_rollouts))
        seen_N = torch.full((batch.layout.num_tokens,), torch.nan)
        minibatch = Minibatch(batch=batch, targets=targets, rollouts=rollouts, seen_N=seen_N, is_first=True)
        routers = Routers(self.module, updater.scorer, updater._config.algorithm, replays=False)
        losses = OptimizerStep(
            self.shared, self.rank, updater.scorer, routers=routers, guard=updater.guard, has_critic=False
        )
        return updater.on_rollouts(minibatch), losses, updater

    def measured(self, batch: StepBatch, targets: Targets, *algorithms: dict[str, Any]) -> list[Measured]:
        found = [self.token_set(batch, targets, **algorithm) for algorithm in algorithms]
        tokens, losses, updater = found[0]
        return measure(losses, self.module, updater.scorer, [one[0] for one in found], groups(batch, tokens))


def groups(batch: StepBatch, tokens: TokenSet) -> list[tuple[list[int], int]]:
    group_of = batch.group_S[batch.layout.rollout_index]
    return [([row for row in tokens.rows if group_of[row] == group], half) for half, group in enumerate((0, 1))]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


GRPO, GSPO, CISPO = {"loss": "ppo_clip"}, {"loss": "gspo"}, {"loss": "cispo"}


def test_at_ratio_1_grpo_gspo_and_cispo_have_the_same_gradient(toy: Toy) -> None:
    batch, targets = toy.step(at_ratio_1=True)
    grpo, gspo, cispo = toy.measured(batch, targets, GRPO, GSPO, CISPO)
    assert grpo.norm > 0
    assert difference(gspo.gradient_P, grpo.gradient_P) < TOLERANCE
    assert difference(cispo.gradient_P, grpo.gradient_P) < TOLERANCE
    assert difference(gspo.weights_N, grpo.weights_N) < TOLERANCE


def test_off_ratio_1_they_differ(toy: Toy) -> None:
    batch, targets = toy.step()
    grpo, gspo, cispo = toy.measured(batch, targets, GRPO, GSPO, CISPO)
    assert difference(gspo.gradient_P, grpo.gradient_P) > 0.01
    assert difference(cispo.gradient_P, grpo.gradient_P) > 0.01
    assert grpo.sums["policy/clip_frac"] > 0


def test_with_equal_lengths_the_mean_over_rollouts_is_the_mean_over_tokens(toy: Toy) -> None:
    batch, targets = toy.step(equal_lengths=True)
    by_token, by_rollout = toy.measured(batch, targets, {"normalizer": "token"}, {"normalizer": "grpo"})
    assert difference(by_rollout.gradient_P, by_token.gradient_P) < TOLERANCE
    batch, targets = toy.step()
    by_token, by_rollout = toy.measured(batch, targets, {"normalizer": "token"}, {"normalizer": "grpo"})
    assert difference(by_rollout.gradient_P, by_token.gradient_P) > 0.01


def test_the_gradient_is_that_of_the_update(toy: Toy) -> None:
    """With terms beside the policy loss: KL and entropy."""
    algorithm = {"loss": "gspo", "kl_coef": 0.1, "entropy_coef": 0.01}
    batch, targets = toy.step(**algorithm)
    (found,) = toy.measured(batch, targets, algorithm)
    updater = Updater(toy.module, toy.rank, toy.config(**algorithm))
    updater.update(batch, targets)
    assert difference(found.gradient_P, toy.rank.gradient) < TOLERANCE


def test_the_gradient_is_the_sum_of_the_weights_times_the_slopes_of_logprobs(toy: Toy) -> None:
    batch, targets = toy.step()
    (found,) = toy.measured(batch, targets, GSPO)
    tokens, _, updater = toy.token_set(batch, targets, **GSPO)
    total = torch.zeros(())
    for pack in updater.scorer.share(batch, tokens.rows).packs:
        packed = updater.scorer.packed(batch, pack)
        logp_T, *_ = toy.module(packed, temperature=1.0, with_entropy=False)
        total = total + (found.weights_N[packed.token_index_T] * logp_T).sum()
    by_weights = flat(torch.autograd.grad(total, trained(toy.module)))
    assert difference(by_weights, found.gradient_P) < TOLERANCE


def test_signal_to_noise_is_the_mean_over_all_divisions_into_halves(toy: Toy) -> None:
    batch, targets = toy.step()
    (found,) = toy.measured(batch, targets, GRPO)
    first, second = found.halves_2P
    expected = 2 * dot(first, second) / (dot(first, first) + dot(second, second))
    assert found.signal_to_noise == pytest.approx(expected, rel=1e-9)


def test_a_trial_step_is_that_of_the_optimizer_and_is_taken_back() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    optimizer = make_optimizer(module, OptimizerConfig(lr=0.1))
    rank = TrialSteps(_Accelerator(0), max_grad_norm=1.0)  # type: ignore[arg-type]
    rank.prepare(module, optimizer)
    for number in range(3):  # with moments
        gradient = torch.randn(8, generator=torch.Generator().manual_seed(number)).double()
        before = flat([p.detach() for p in module.parameters()]).clone()
        change = rank.trial(gradient, lr=0.1)
        again = rank.trial(gradient, lr=0.1)
        assert torch.equal(flat([p.detach() for p in module.parameters()]), before)
        assert torch.equal(change, again)
        for parameter, part in zip(module.parameters(), gradient.split([6, 2]), strict=True):
            parameter.grad = part.view(parameter.shape).clone()
        rank.step(0.1, float(gradient.norm()))
        after = flat([p.detach() for p in module.parameters()])
        assert torch.allclose(after - before, change, atol=1e-15)


def test_the_prediction_is_the_slope_of_the_reward_of_held_out_rollouts(toy: Toy) -> None:
    """In float64: in float32 the difference of two rewards is lost in rounding."""
    reward = {"loss": "reinforce", "advantage": "rloo", "normalizer": "sequence_sum"}
    batch, targets = toy.step(at_ratio_1=True, **reward)
    targets = replace(
        targets, correction=replace(targets.correction, keep_N=torch.ones(len(batch.rollout_N), dtype=torch.bool))
    )
    tokens, losses, updater = toy.token_set(batch, targets, **reward)
    slopes = [
        -g
        for rows, _ in groups(batch, tokens)
        for *_, g, _ in backward(losses, toy.module, updater.scorer, [tokens], rows)
    ]
    (grpo,) = toy.measured(batch, targets, GRPO)
    change = -1e-6 * grpo.gradient_P / grpo.norm

    def logp() -> Tensor:
        logp_N = torch.zeros(batch.layout.num_tokens, dtype=torch.float64)
        with torch.no_grad():
            for pack in updater.scorer.share(batch, tokens.rows).packs:
                packed = updater.scorer.packed(batch, pack)
                logp_N[packed.token_index_T] = toy.module(packed, temperature=1.0, with_entropy=False)[0]
        return logp_N

    before_N, start = logp(), [p.detach().clone() for p in trained(toy.module)]
    sizes = [p.numel() for p in start]
    with torch.no_grad():
        for parameter, part in zip(trained(toy.module), change.split(sizes), strict=True):
            parameter.add_(part.view(parameter.shape))
    ratio_S = (
        torch.zeros(batch.num_rollouts, dtype=torch.float64).index_add_(0, batch.rollout_N, logp() - before_N).exp()
    )
    with torch.no_grad():
        for parameter, old in zip(trained(toy.module), start, strict=True):
            parameter.copy_(old)
    first_token = [int((batch.rollout_N == s).nonzero()[0]) for s in range(batch.num_rollouts)]
    advantages_S = targets.advantages_N[first_token].double()
    real = float((advantages_S * (ratio_S - 1)).mean())
    assert sum(dot(slope, change) for slope in slopes) == pytest.approx(real, rel=1e-3)
