"""The policy loss as a component: what reaches the loss, and its metrics."""

from __future__ import annotations

import pytest
import torch

from lockstep.trainer.update.components.policy_component import policy_component
from tests.fixtures.loss_steps import COUNT, computed, loss_step, outputs_of


def test_the_loss_gets_the_targets_of_its_tokens_in_any_order() -> None:
    step = loss_step(loss="ppo_clip")
    order = torch.tensor([4, 0, 5, 2])
    whole = outputs_of(step.batch)
    part = outputs_of(
        step.batch,
        index_T=order,
        rollout_T=whole.rollout_T[order],
        sampling_logp_T=whole.sampling_logp_T[order],
        logp_T=whole.logp_T[order],
    )
    term, share, _ = computed(policy_component(step), part)
    ratio_T = (whole.logp_T - step.targets.old.logp_N)[order].exp()
    assert (term.weight, term.num_tokens, term.in_policy_loss) == (1.0, COUNT, True)
    torch.testing.assert_close(share.loss_T, -ratio_T * step.targets.advantages_N[order])  # none is clipped


def test_values_of_the_whole_step_reach_the_loss() -> None:
    step = loss_step(loss="gspo", normalizer="grpo")
    _, share, _ = computed(policy_component(step), outputs_of(step.batch))
    assert share.loss_T is not None
    torch.testing.assert_close(share.loss_T, -step.targets.advantages_N)  # the first update has the old logprobs: s = 1


def test_with_a_critic_its_metrics_also_have_the_names_of_ppo() -> None:
    step = loss_step(loss="ppo_clip", has_critic=True)
    _, share, metrics = computed(policy_component(step), outputs_of(step.batch))
    assert share.loss_T is not None
    assert metrics["ppo/policy/loss"] == pytest.approx(float(share.loss_T.detach().mean()))
    assert metrics["ppo/policy/approxkl"] == metrics["policy/approx_kl"] > 0
    assert metrics["ppo/policy/clipfrac"] == metrics["policy/clip_frac"]
    without = loss_step(loss="ppo_clip")
    *_, metrics = computed(policy_component(without), outputs_of(without.batch))
    assert not [name for name in metrics if name.startswith("ppo/")]
