"""The critic: values of packed rows, with a shared or a separate trunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GPT2Config, GPT2LMHeadModel

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.model.critic import ActorCritic, Critic, ValueHead
from lockstep.trainer.model.policy import Policy, policy_of
from tests.fixtures.models import tiny_qwen3


def row(length: int, seed: int) -> TrainingRow:
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.6
    mask[0], mask[-1] = False, True
    return TrainingRow(
        ids=rng.integers(0, 500, length),
        loss_mask=mask,
        sampling_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.where(mask, 0, -1).astype(np.int32),
        rollout_id=seed,
    )


ROWS = [row(9, 1), row(4, 2), row(17, 3)]


def tiny_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=512, n_positions=64, initializer_range=0.2)
    return GPT2LMHeadModel(config)


MODELS = {"qwen3": lambda: tiny_qwen3(tied=True), "gpt2": tiny_gpt2}


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    MODELS[request.param]().save_pretrained(tmp_path)
    return tmp_path


def give_weight(module: ActorCritic) -> ValueHead:
    head = module.critic if isinstance(module.critic, ValueHead) else module.critic.head
    torch.nn.init.normal_(head.linear.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(head.linear.bias, 0.25)
    return head


def make(saved, kind) -> ActorCritic:
    policy = Policy.from_pretrained(saved)
    return ActorCritic.shared(policy) if kind == "shared" else ActorCritic(policy, Critic.from_pretrained(saved))


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_all_values_are_zero_at_step_zero(saved, kind):
    _, _, values = make(saved, kind)(collate(ROWS, [0, 1, 2]), with_values=True)
    assert values.abs().max() == 0
    assert len(values) == sum(r.num_trained for r in ROWS)


@pytest.mark.parametrize("kind", ["shared", "separate"])
@torch.no_grad()
def test_the_value_of_a_token_is_read_from_the_state_before_it_in_its_own_row(saved, kind):
    module = make(saved, kind)
    head = give_weight(module)
    logp, entropy, values = module(collate(ROWS, [2, 0, 1]), with_values=True)
    decoder = AutoModelForCausalLM.from_pretrained(saved).eval().base_model
    expected = []
    for index in (2, 0, 1):
        hidden = decoder(torch.from_numpy(ROWS[index].ids)[None]).last_hidden_state[0]
        expected.append(head(hidden[np.flatnonzero(ROWS[index].loss_mask) - 1]))
    torch.testing.assert_close(values, torch.cat(expected), rtol=1e-4, atol=1e-5)
    alone = module(collate(ROWS, [2, 0, 1]))
    torch.testing.assert_close(alone, (logp, entropy))


def test_a_shared_trunk_runs_forward_once(saved):
    module = make(saved, "shared")
    calls = []
    module.policy.causal_lm.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    module(collate(ROWS, [0, 1]), with_values=True)
    assert len(calls) == 1


def test_a_value_loss_reaches_the_shared_trunk_and_leaves_a_separate_policy_alone(saved):
    for kind in ("shared", "separate"):
        module = make(saved, kind)
        give_weight(module)
        module(collate(ROWS, [0, 1]), with_values=True)[2].square().sum().backward()
        norms = [p.grad is not None and bool(p.grad.abs().sum() > 0) for p in module.policy.parameters()]
        assert any(norms) == (kind == "shared")


def test_a_pack_without_trained_tokens_reaches_every_parameter(saved):
    module = make(saved, "separate")
    logp, entropy, values = module(collate(ROWS, []), with_values=True)
    (logp.sum() + entropy.sum() + values.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in module.parameters())


def test_the_policy_is_found_with_and_without_a_critic(saved):
    module = make(saved, "shared")
    assert policy_of(module) is module.policy
    assert policy_of(module.policy) is module.policy


def test_a_critic_path_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="critic_path"):
        Critic.from_pretrained(tmp_path / "nowhere")


def test_a_critic_can_have_a_learning_rate_of_its_own(saved):
    from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
    from lockstep.trainer.update.optimizers.optimizer import LR_SCALE, make_optimizer

    module = make(saved, "separate")
    groups = make_optimizer(module, OptimizerConfig(lr=1e-4, critic_lr=1e-3)).param_groups
    scale_of = {id(parameter): group[LR_SCALE] for group in groups for parameter in group["params"]}
    assert all(scale_of[id(parameter)] == pytest.approx(10) for parameter in module.critic.parameters())
    assert all(scale_of[id(parameter)] == 1 for parameter in module.policy.parameters())
    assert len(scale_of) == len(list(module.parameters()))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_values_are_computed_in_float32_under_autocast(weights: torch.dtype):
    torch.manual_seed(0)
    head = ValueHead(32)
    torch.nn.init.normal_(head.linear.weight)
    torch.nn.init.constant_(head.linear.bias, 20.0)
    head.to(weights)
    hidden_TD = torch.randn(64, 32).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        values_T = head(hidden_TD)
    exact_T = head.double()(hidden_TD.double())
    assert values_T.dtype == torch.float32
    assert float((values_T - exact_T).abs().max()) < 1e-4
    values_T.sum().backward()
    assert head.linear.weight.grad is not None


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_loaded_head_computes_in_float32_too(name: str, tmp_path):
    saved_as_a_critic(name, tmp_path)
    critic = Critic.from_pretrained(tmp_path)
    hidden_TD = torch.randn(8, critic.head.linear.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        found_T = critic.head(hidden_TD)
    assert torch.equal(found_T, critic.head(hidden_TD))


def saved_as_a_critic(name: str, path) -> None:
    model = MODELS[name]()
    config = model.config
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(path)
