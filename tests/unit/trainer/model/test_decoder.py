"""A prepared decoder computes each row of a pack as transformers computes it alone.

Models that cannot be packed: test_policy.py and test_text_models.py.
"""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Llama4ForCausalLM, PhimoeConfig, PhimoeForCausalLM

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.critic import Critic
from lockstep.trainer.model.decoder import (
    attention_of,
    can_share_prefixes,
    choose_attention,
    packed_hidden_states,
    prepare,
)
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES
from tests.fixtures.models import tiny_qwen3
from tests.unit.trainer.model.test_critic import MODELS, ROWS, tiny_gpt2

# Hidden states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_each_row_of_a_pack_is_computed_as_transformers_computes_it_alone(
    name: str, attention: str, dtype: torch.dtype
) -> None:
    plain, prepared = MODELS[name]().eval().to(dtype), MODELS[name]().to(dtype)
    prepare(prepared, attn_implementation=attention)
    packed = collate(ROWS, [2, 0, 1])
    with torch.no_grad():
        found = packed_hidden_states(prepared.get_decoder(), packed)
        alone = [plain.get_decoder()(torch.from_numpy(ROWS[i].ids)[None]).last_hidden_state[0] for i in (2, 0, 1)]
    expected = torch.cat(alone)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    bound = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]
    if attention == "eager" and dtype == torch.float64:
        bound = 1e-5  # transformers computes its softmax in float32
    assert float((found - expected).abs().max() / expected.abs().max()) < bound


def test_policy_and_critic_prepare_their_decoders_alike(tmp_path) -> None:
    tiny_qwen3(tied=True).save_pretrained(tmp_path)
    packed = collate(ROWS, [0, 1, 2])
    with torch.no_grad():
        policy, critic = Policy.from_pretrained(tmp_path), Critic.from_pretrained(tmp_path)
        assert torch.equal(policy.hidden_states(packed), packed_hidden_states(critic.decoder, packed))


# Preparation


def test_a_prepared_model_is_in_train_mode_and_has_no_randomness_left() -> None:
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=512, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = GPT2LMHeadModel(config)
    prepare(model, gradient_checkpointing=True)
    assert model.training
    assert model.is_gradient_checkpointing
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0, 0, 0)
    packed = collate(ROWS, [0])
    first, second = (packed_hidden_states(model.get_decoder(), packed) for _ in range(2))
    assert torch.equal(first, second)


def test_modules_that_sample_experts_in_train_mode_stay_in_eval_mode_and_their_children_do_not() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = PhimoeForCausalLM(PhimoeConfig(**sizes, intermediate_size=16, vocab_size=32, num_local_experts=2))
    prepare(model)
    noisy = [module for module in model.modules() if any("jitter" in name for name in vars(module))]
    assert noisy
    model.train()
    assert not any(module.training for module in noisy)
    model.eval()
    model.train()
    assert all(module.training for module in model.modules() if module not in noisy)


def test_only_packed_rows_shares_prefixes_and_only_if_all_models_do() -> None:
    models = [tiny_qwen3(tied=True), tiny_gpt2()]
    for model, attention in zip(models, ("packed_rows", "sdpa"), strict=True):
        prepare(model, attn_implementation=attention)
        assert attention_of(model) == attention
        assert can_share_prefixes(model) == (attention == "packed_rows")
    assert not can_share_prefixes(torch.nn.ModuleList(models))
    assert not can_share_prefixes(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("requested", "compute_dtype", "expected"),
    [
        ("auto", None, "packed_rows"),
        ("auto", "bfloat16", "packed_rows"),
        ("eager", None, "eager"),
        ("flash_attention_2", "bfloat16", "flash_attention_2"),
        ("flash_attention_3", torch.float16, "flash_attention_3"),
    ],
)
def test_the_requested_attention_is_used_where_it_computes_exactly(
    requested: str, compute_dtype: torch.dtype | str | None, expected: str
) -> None:
    assert choose_attention(requested, tiny_qwen3(tied=True), compute_dtype) == expected


def test_attention_that_would_compute_something_else_is_refused() -> None:
    model = tiny_qwen3(tied=True)
    for dtype in (None, "float32"):
        with pytest.raises(ConfigError, match=r"needs bfloat16 or float16, found torch\.float32"):
            choose_attention("flash_attention_2", model, dtype)
    with pytest.raises(ConfigError, match="expected one of auto"):
        choose_attention("flex", model, None)
    chunked = Llama4ForCausalLM(FAMILIES["llama4"]())
    assert choose_attention("auto", chunked, None) == "packed_rows"
    with pytest.raises(ConfigError, match=r"chunks and positions of Llama 4.*packed_rows"):
        choose_attention("sdpa", chunked, None)


def test_rotary_positions_depend_on_the_context_of_engines_only_where_engines_sample() -> None:
    config = Config()
    config.rollout.max_model_len = 777
    assert config.rotary_context == config.engine_context == 777
    config.algorithm.trains_on = "demonstrations"
    assert not config.has_rollouts
    assert config.rotary_context is None


def test_optimizers_that_cannot_work_are_refused_before_anything_heavy_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.optimizer.name = "adamw_8bit"
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        validate(config, needs_data=False)
    config.optimizer.name = "muon"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    with pytest.raises(ConfigError, match=r"ddp\.yaml"):
        validate(config, needs_data=False)
