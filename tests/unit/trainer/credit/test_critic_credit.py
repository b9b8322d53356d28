"""Targets with a critic: minibatches, masked tokens, multi-turn rollouts, conflicting settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.checks.declared import unused_problems
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.critic_credit import CriticTargets, critic_targets
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.critic import Credit
from lockstep.trainer.objective.gae import gae
from lockstep.trainer.objective.whitening import moments, standardize

assign = ADVANTAGES["gae"]
PLAIN = {"whiten_rewards": False, "whiten_advantages": False}
WHITE = {"whiten_rewards": True, "whiten_advantages": True}


def whiten(x: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    return standardize(x, moments(x), shift_mean=shift_mean)


def credit(lengths, *, keep=None) -> Credit:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    return Credit(
        rewards_N=torch.randn(total, generator=generator),
        values_N=torch.randn(total, generator=generator),
        rollout_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        turns_N=torch.zeros(total, dtype=torch.int64),
        keep_N=torch.ones(total, dtype=torch.bool) if keep is None else keep,
    )


def test_a_minibatch_whitens_with_its_own_statistics_and_computes_gae_again():
    whole = credit([4, 7, 3, 5])
    chosen = torch.isin(whole.rollout_N, torch.tensor([1, 3]))
    advantages, returns = assign(whole, chosen, **WHITE)

    rewards, values = whole.rewards_N[chosen], whole.values_N[chosen]
    white = whiten(rewards, shift_mean=False)
    parts = [
        gae(white[None, a:b], values[None, a:b], torch.ones(1, b - a).bool(), gamma=1.0, lam=0.95)
        for a, b in ((0, 7), (7, 12))
    ]
    expected = torch.cat([part.advantages[0] for part in parts])
    torch.testing.assert_close(returns[chosen], expected + values)
    torch.testing.assert_close(advantages[chosen], whiten(expected))
    assert (advantages[~chosen] == 0).all()
    other, _ = assign(whole, torch.ones_like(chosen), **WHITE)
    assert not torch.allclose(other[chosen], advantages[chosen])


def test_returns_come_from_advantages_before_they_are_whitened():
    whole = credit([6, 6])
    chosen = torch.ones(12, dtype=torch.bool)
    _, plain = assign(whole, chosen, **PLAIN)
    _, white = assign(whole, chosen, whiten_rewards=False, whiten_advantages=True)
    torch.testing.assert_close(plain, white)


def test_masked_tokens_pass_credit_on_but_do_not_enter_statistics():
    keep = torch.tensor([True, False, True, True, True, True])
    whole, masked = credit([3, 3]), credit([3, 3], keep=keep)
    chosen = torch.ones(6, dtype=torch.bool)
    torch.testing.assert_close(assign(whole, chosen, **PLAIN), assign(masked, chosen, **PLAIN))
    advantages, _ = assign(masked, chosen, whiten_advantages=True)
    assert float(advantages[keep].mean()) == pytest.approx(0, abs=1e-6)


def test_every_epoch_visits_every_rollout_once_in_its_own_order():
    from lockstep.trainer.update.updater import Updater

    config = Config(algorithm=AlgorithmConfig(advantage="gae", epochs=3, minibatches=4))
    updater = Updater(torch.nn.Linear(1, 1), distributed=None, config=config)  # type: ignore[arg-type]  # cuts, no more
    parts = list(updater._minibatches(12))
    epochs = [np.concatenate(parts[i : i + 4]).tolist() for i in (0, 4, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


# A whole step


def batch(*, turn_rewards: tuple[float, ...] | None = None):
    def call(prompt, sampled):
        return EngineCall(
            prompt_ids=prompt, sampled_ids=sampled, sampled_logprobs=(-1.0,) * len(sampled),
            finish_reason=FinishReason.STOP,
        )  # fmt: skip

    first = call((1, 2), (3, 4))
    second = call((*first.all_ids, 9, 9, 9), (5,))  # a tool result of three tokens lies between
    rollouts = [
        Rollout(
            rollout_id=0, group_id=0, calls=(first, second), reward=1.0, outcome={"turn_rewards": turn_rewards or ()}
        ),
        Rollout(rollout_id=1, group_id=1, calls=(call((1, 2, 3), (7, 8)),), reward=-0.5),
    ]
    return StepBatch.of(rollouts, mask_truncated=False, with_turn_rewards=turn_rewards is not None)


def assigned(*, turn_rewards: tuple[float, ...] | None = None, **settings) -> CriticTargets:
    step = batch(turn_rewards=turn_rewards)
    config = Config(algorithm=AlgorithmConfig(advantage="gae", whiten_advantages=False, **settings))
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0])
    ref = torch.tensor([-1.5, -2.0, -1.0, -1.0, -1.0]) if settings.get("kl_coef") else None
    old_policy = Recomputed(old)
    logprobs = Logprobs(old=old_policy, ref_N=ref, values_N=torch.tensor([0.5, 0.25, 0.75, 0.1, 0.2]))
    correction = StepCorrection.of(step, old_policy, CorrectionConfig(mode="off"))
    return critic_targets(step, logprobs, correction, config.algorithm, kl_coef=config.algorithm.kl_coef)


def test_the_next_value_across_a_tool_result_is_that_of_the_next_trained_token():
    result = assigned(gae_lambda=0.0)
    # δ = V_next − V, and at the end score − V
    torch.testing.assert_close(result.targets.advantages_N, torch.tensor([-0.25, 0.5, 0.25, 0.1, -0.7]))


def test_the_kl_penalty_its_adapted_coefficient_and_the_metrics_of_a_step():
    result = assigned(gae_lambda=1.0, kl_coef=0.1, kl_place="reward", kl_target=1.0, kl_horizon=100)
    # kl per token: 0.5, 0, −2; the penalty is −0.1 of it
    torch.testing.assert_close(result.targets.credit.rewards_N, torch.tensor([-0.05, 0.0, 0.2 + 1.0, 0.0, -0.5]))
    assert result.metrics["objective/kl"] == pytest.approx(-0.75)
    assert result.metrics["objective/score"] == pytest.approx(0.25)
    assert result.metrics["objective/non_score_reward"] == pytest.approx(0.075)
    assert result.metrics["objective/score_total"] == pytest.approx(0.325)
    assert result.next_kl_coef == pytest.approx(0.1 * (1 - 0.2 * 2 / 100))
    assert assigned(kl_coef=0.1, kl_place="reward").next_kl_coef == 0.1, "without a target"


def test_a_turns_reward_is_paid_where_the_turn_ends():
    """The first turn reports 0.6 of the rollout's 1.0; the last turn gets the rest."""
    whole = assigned(gae_lambda=1.0)
    split = assigned(gae_lambda=1.0, turn_rewards=(0.6,))
    torch.testing.assert_close(whole.targets.credit.rewards_N, torch.tensor([0.0, 0.0, 1.0, 0.0, -0.5]))
    torch.testing.assert_close(split.targets.credit.rewards_N, torch.tensor([0.0, 0.6, 0.4, 0.0, -0.5]))
    # reward-to-go less the value: the last turn gets no credit for earlier rewards
    torch.testing.assert_close(split.targets.advantages_N, torch.tensor([0.5, 0.75, -0.35, -0.6, -0.7]))
    assert split.metrics["objective/score"] == whole.metrics["objective/score"]


def test_without_a_reference_no_kl_is_reported():
    result = assigned()
    assert "objective/kl" not in result.metrics
    assert result.next_kl_coef == 0.0
    assert result.metrics["objective/score"] == pytest.approx(0.25)


def test_an_optimizer_step_on_some_rollouts_has_its_own_targets():
    settings = AlgorithmConfig(advantage="gae", gae_lambda=1.0, whiten_advantages=False)
    own = assigned(gae_lambda=1.0).targets.for_rollouts(torch.tensor([1]), settings)
    assert own.returns_N is not None
    torch.testing.assert_close(own.returns_N, torch.tensor([0.0, 0.0, 0.0, -0.5, -0.5]))


# Settings


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kl_target": 6.0, "kl_coef": 0.1, "kl_place": "reward", "kl_horizon": 20}, "turn the sign"),
        ({"gae_lambda": 1.5}, "between 0 and 1"),
        ({"value_clip": 0.0}, "greater than 0; set algorithm.value_clip=0.2"),
        ({"turn_rewards": True, "turn_discount": 0.9}, "turn_discount=1.0"),
        ({"minibatches": 7}, "set algorithm.minibatches=8"),
    ],
)
def test_conflicting_settings_are_refused_with_an_override_that_works(change, sentence):
    config = Config(algorithm=AlgorithmConfig(advantage="gae", **change))
    with pytest.raises(ConfigError, match=sentence):
        validate(config, needs_data=False)


def test_a_warmup_of_a_shared_critic_is_refused():
    config = Config(algorithm=AlgorithmConfig(advantage="gae", critic_warmup=10))
    config.model.critic = "shared"
    with pytest.raises(ConfigError, match=r"set model\.critic=separate or algorithm\.critic_warmup=0"):
        validate(config, needs_data=False)


def test_a_kl_target_without_a_kl_in_the_reward_is_refused():
    config = Config(algorithm=AlgorithmConfig(advantage="gae", kl_target=6.0))
    (problem,) = unused_problems(config)
    assert problem.endswith("algorithm.kl_coef=0.15, or algorithm.kl_target=null")


def test_fixed_length_responses_require_one_turn():
    config = Config()
    config.model.path, config.environment.name = "org/model", "user"
    config.rollout.ignore_eos = True
    with pytest.raises(ConfigError, match=r"environment\.max_turns=1"):
        validate(config, needs_data=False)


# λ of its own, and by length


def test_values_are_trained_on_returns_of_their_own_lambda():
    """Decoupled GAE: rewards-to-go for the values, λ = 0.5 for the advantages, by plain sums."""
    whole = credit([3, 2])
    chosen = torch.ones(5, dtype=torch.bool)
    advantages, returns = assign(whole, chosen, gae_lambda=0.5, critic_lambda=1.0, **PLAIN)
    rewards = whole.rewards_N.tolist()
    to_go = [sum(rewards[0:3]), sum(rewards[1:3]), rewards[2], sum(rewards[3:5]), rewards[4]]
    assert returns.tolist() == pytest.approx(to_go, abs=1e-6)
    coupled, other = assign(whole, chosen, gae_lambda=0.5, **PLAIN)
    torch.testing.assert_close(advantages, coupled)
    assert not torch.allclose(returns, other)


def test_the_length_of_a_multi_turn_rollout_is_that_of_all_its_turns():
    """Rollout 0 has 2 + 1 trained tokens in two turns around a tool result, rollout 1 has 2: with α = 0.5 their λ are
    1/3 and 0."""
    result = assigned(gae_length_alpha=0.5)
    # δ: .25 − .5, .75 − .25, 1 − .75 | .2 − .1, −.5 − .2
    expected = [-0.25 + (0.5 + 0.25 / 3) / 3, 0.5 + 0.25 / 3, 0.25, 0.1, -0.7]
    torch.testing.assert_close(result.targets.advantages_N, torch.tensor(expected))
