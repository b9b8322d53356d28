"""Recorded routers against what transformers itself records, and the weights of their losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Llama4TextConfig, Llama4TextModel, PreTrainedModel

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.layers.router_outputs import RouterOutputs, router_coefs, routers
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.shape import planned_shape
from tests.fixtures.families import FAMILIES, SIZES

MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "granitemoe", "gpt_oss")
DEEPSEEK = DeepseekV3Config(
    **SIZES | {"num_key_value_heads": 2}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    first_k_dense_replace=1, n_group=1, topk_group=1, n_shared_experts=1, kv_lora_rank=16, q_lora_rank=32,
    qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32,
)  # fmt: skip
CONFIGS = {name: FAMILIES[name] for name in MIXTURES} | {"deepseek_v3": lambda: DEEPSEEK}
IDS = list(range(3, 40))


def policy_of(family: str, **setup: bool) -> Policy:
    torch.manual_seed(0)
    config = CONFIGS.get(family) or FAMILIES[family]
    return Policy(AutoModelForCausalLM.from_config(config()), **setup)


def decoder_of(policy: Policy) -> PreTrainedModel:
    return policy.causal_lm.get_decoder()


@pytest.mark.parametrize("family", CONFIGS)
def test_recorded_logits_are_those_of_transformers_and_the_choices_those_of_the_router(family: str) -> None:
    policy = policy_of(family)
    with torch.no_grad():
        for name, buffer in policy.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor([3.0, -3.0, 3.0, -3.0]))  # experts 0 and 2, whatever the logits say
    outputs = RouterOutputs(decoder_of(policy))
    packed = collate([whole_row(IDS)], [0])
    with outputs.recorded(with_logits=True) as records:
        policy(packed)
    plain = policy.causal_lm.get_decoder()(torch.tensor([IDS]), use_cache=False, output_router_logits=True)
    assert len(records) == len(plain.router_logits) == outputs.num_routers > 0
    for record, expected in zip(records, plain.router_logits, strict=True):
        assert record.logits_LE is not None
        torch.testing.assert_close(record.logits_LE, expected.flatten(0, -2), rtol=1e-4, atol=1e-5)
        chosen = record.logits_LE.topk(2).indices
        if family in ("glm4_moe", "deepseek_v3"):
            chosen = torch.tensor([0, 2]).expand(len(IDS), 2)
        assert torch.equal(record.chosen_LK.sort().values, chosen.sort().values)
        assert record.num_experts == 4


def test_nothing_is_recorded_outside_of_the_block_and_in_recomputed_passes() -> None:
    policy = policy_of("qwen3_moe", gradient_checkpointing=True)
    runs: list[int] = []
    policy.causal_lm.get_submodule("model.layers.0").register_forward_pre_hook(lambda *_: runs.append(1))
    outputs = RouterOutputs(decoder_of(policy))
    packed = collate([whole_row(IDS)], [0])
    with outputs.recorded(with_logits=True) as records:
        logp_T, _ = policy(packed)
    assert len(records) == 2
    loss = sum(record.logits_LE.square().sum() for record in records if record.logits_LE is not None)
    (logp_T.sum() + loss).backward()
    assert len(runs) == 2, "nothing was recomputed, so nothing was tested"
    policy(packed)
    assert len(records) == 2
    with outputs.recorded(with_logits=False) as records:
        policy(packed)
    assert [record.logits_LE for record in records] == [None, None]


def test_a_checkpointed_layer_gives_router_losses_the_same_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = policy_of("qwen3_moe", gradient_checkpointing=checkpointing)
        outputs = RouterOutputs(decoder_of(policy))
        with outputs.recorded(with_logits=True) as records:
            logp_T, _ = policy(collate([whole_row(IDS)], [0]))
        loss = sum(record.logits_LE.logsumexp(-1).square().sum() for record in records)  # type: ignore[union-attr]
        (0.0 * logp_T.sum() + loss).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)


def test_choices_that_a_router_does_not_name_are_its_largest_logits() -> None:
    """Llama 4's router gives scores of all experts, of which those that are not chosen are 0. Checked under gradient
    checkpointing, where a hook must not save tensors for the backward pass."""
    config = Llama4TextConfig(**SIZES, intermediate_size_mlp=128, num_local_experts=4, num_experts_per_tok=2)
    model = Llama4TextModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    scores: list[torch.Tensor] = []
    for router, _ in routers(model.train()):
        router.register_forward_hook(lambda module, inputs, output: scores.append(output[0]))
    outputs = RouterOutputs(model)
    with outputs.recorded(with_logits=True) as records:
        hidden = model(torch.tensor([IDS]), use_cache=False).last_hidden_state
    assert len(records) == 2
    for record, scores_LE in zip(records, scores, strict=True):
        assert torch.equal(record.chosen_LK.sort().values, scores_LE.nonzero()[:, 1].view(-1, 2))
    losses = [record.logits_LE.square().sum() for record in records if record.logits_LE is not None]
    (hidden.sum() + sum(losses)).backward()


def test_a_dense_model_has_no_routers_and_refuses_their_losses() -> None:
    policy = policy_of("qwen3")
    assert RouterOutputs(decoder_of(policy)).num_routers == 0
    assert router_coefs(decoder_of(policy), AlgorithmConfig()) == (0.0, 0.0)
    message = r"algorithm\.router_z_coef=0\.1 needs a mixture of experts.*found qwen3.*set algorithm\.router_z_coef=0"
    with pytest.raises(ConfigError, match=message):
        router_coefs(decoder_of(policy), AlgorithmConfig(router_z_coef=0.1))


def test_null_takes_the_weight_of_the_model_or_says_that_it_has_none() -> None:
    policy = policy_of("olmoe")
    assert router_coefs(decoder_of(policy), AlgorithmConfig(router_aux_coef=None)) == (0.01, 0.0)
    assert router_coefs(decoder_of(policy), AlgorithmConfig(router_aux_coef=0.3, router_z_coef=0.2)) == (0.3, 0.2)
    with pytest.raises(ConfigError, match=r"router_z_coef=null takes router_z_loss_coef.*olmoe does not have"):
        router_coefs(decoder_of(policy), AlgorithmConfig(router_z_coef=None))
    with pytest.raises(ConfigError, match=re.escape("set algorithm.router_aux_coef to a number")):
        router_coefs(decoder_of(policy_of("glm4_moe")), AlgorithmConfig(router_aux_coef=None))


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path) -> None:
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    config = Config(algorithm=AlgorithmConfig(router_aux_coef=None))
    config.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"router_aux_coef=null needs a mixture of experts"):
        planned_shape(config.model, config.algorithm)
