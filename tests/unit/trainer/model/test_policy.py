"""The policy scores packed rows as if each were alone, and refuses unfit models with a message."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.model.critic import Critic
from lockstep.trainer.model.policy import Policy

VOCAB = 512
LENGTHS = (5, 17, 9, 30, 2)
TEMPERATURE = 0.7
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
PATHS = ("packed_rows", "sdpa", "eager")


def qwen3(**settings) -> Qwen3Config:
    return Qwen3Config(**(SIZES | {"tie_word_embeddings": True} | settings))


def build(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, **settings) -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(config).to(dtype), **settings)


def rows(lengths=LENGTHS) -> list[TrainingRow]:
    rng = np.random.default_rng(1)
    result = []
    for index, length in enumerate(lengths):
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        result.append(
            TrainingRow(
                ids=rng.integers(0, VOCAB, length),
                loss_mask=mask,
                sampling_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turns=np.where(mask, 0, -1).astype(np.int32),
                rollout_id=index,
            )
        )
    return result


@torch.no_grad()
def alone(config: PreTrainedConfig, row: TrainingRow, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Score one row with transformers' own forward: eager attention, full logits, log-softmax."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    logp = torch.log_softmax(model(torch.from_numpy(row.ids)[None], use_cache=False).logits[0] / temperature, -1)
    targets = np.flatnonzero(row.loss_mask)
    return logp[targets - 1, torch.from_numpy(row.ids[targets])]


def score(policy: Policy, packed: PackedBatch) -> torch.Tensor:
    with torch.no_grad():
        return policy(packed, temperature=TEMPERATURE)[0]


CONFIGS = {
    "qwen3 tied": qwen3(),
    "qwen3 untied": qwen3(tie_word_embeddings=False),
    "mistral sliding window": MistralConfig(**(SIZES | {"sliding_window": 4})),
    "gemma2 sliding window, softcaps": Gemma2Config(
        **SIZES, sliding_window=4, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "granite scaled logits": GraniteConfig(**(SIZES | {"logits_scaling": 8.0})),
    "gpt-oss sinks": GptOssConfig(**(SIZES | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1})),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_score_as_each_row_alone(name):
    config = CONFIGS[name]
    expected = torch.cat([alone(config, row) for row in rows()])
    found = score(build(config), collate(rows(), range(len(LENGTHS))))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_every_attention_path_scores_packs_alike(path):
    expected = torch.cat([alone(qwen3(), row) for row in rows()])
    found = score(build(qwen3(), attn_implementation=path), collate(rows(), range(len(LENGTHS))))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def check_that_rows_cannot_see_each_other(policy: Policy, device: str = "cpu") -> None:
    """Assert that changing row 1 changes its scores and not one bit of the others'."""
    changed = rows()
    ids = (changed[1].ids + 1) % VOCAB
    changed[1] = TrainingRow(**({field: getattr(changed[1], field) for field in TrainingRow.__slots__} | {"ids": ids}))
    before, after = (collate(rs, range(len(LENGTHS)), device=device) for rs in (rows(), changed))
    others = before.rollout_T != 1
    first, second = score(policy, before), score(policy, after)
    assert torch.equal(first[others], second[others])
    assert not torch.equal(first[~others], second[~others])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["qwen3 tied", "mistral sliding window"])
def test_rows_cannot_see_each_other(name, path):
    check_that_rows_cannot_see_each_other(build(CONFIGS[name], attn_implementation=path))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("path", "library"), [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")]
)
@pytest.mark.parametrize("name", ["qwen3 tied", "mistral sliding window"])
def test_rows_cannot_see_each_other_in_flash_attention(name, path, library):
    pytest.importorskip(library)
    policy = build(CONFIGS[name], dtype=torch.bfloat16, attn_implementation=path).cuda()
    check_that_rows_cannot_see_each_other(policy, "cuda")


@pytest.mark.parametrize("partition", [[[0, 1, 2, 3, 4]], [[4, 2], [3, 0, 1]], [[0], [1], [2], [3], [4], []]])
def test_gradients_do_not_depend_on_packs_in_float64(partition):
    def gradients(packs: list[list[int]]) -> dict[str, torch.Tensor]:
        policy = build(qwen3(), dtype=torch.float64)
        for indices in packs:
            packed = collate(rows(), indices)
            logp_T, entropy_T = policy(packed, temperature=TEMPERATURE)
            ((1.0 + packed.rollout_T) * logp_T + 0.1 * entropy_T).sum().backward()
        return {name: parameter.grad for name, parameter in policy.named_parameters()}

    expected = gradients([[i] for i in range(len(LENGTHS))])
    for name, gradient in gradients(partition).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10)


def test_a_dummy_pack_reaches_every_parameter_with_zeros():
    policy = build(qwen3(tie_word_embeddings=False), gradient_checkpointing=True).train()
    logp_T, entropy_T = policy(collate(rows(), []))
    (logp_T.sum() + entropy_T.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_dropout_is_off_in_train_mode_and_with_checkpointing():
    config = qwen3(attention_dropout=0.5)
    policy = build(config, gradient_checkpointing=True)
    packed = collate(rows(), range(len(LENGTHS)))
    evaluated = score(policy.eval(), packed)
    trained, _ = policy.train()(packed, temperature=TEMPERATURE)
    assert torch.equal(trained.detach(), evaluated)
    assert policy.model.config.attention_dropout == 0.0


def test_gradient_checkpointing_changes_no_gradient():
    packed = collate(rows(), range(len(LENGTHS)))
    found = []
    for checkpointing in (False, True):
        policy = build(qwen3(), gradient_checkpointing=checkpointing).train()
        policy(packed)[0].sum().backward()
        found.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_checkpointing_is_active_although_models_are_loaded_in_eval_mode(tmp_path):
    """transformers silently ignores checkpointing in eval mode."""
    build(qwen3()).model.save_pretrained(tmp_path)
    for made in (Policy, Critic):
        module = made.from_pretrained(tmp_path, gradient_checkpointing=True)
        runs = []
        module.get_submodule(
            "model.model.layers.0" if made is Policy else "decoder.layers.0"
        ).register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        found = module(collate(rows(), range(len(LENGTHS))))
        (found[0] if made is Policy else found).sum().backward()
        assert len(runs) == 2, f"{made.__name__}: each layer runs again in backward"


def test_the_wrapped_model_still_works_on_padded_batches(tmp_path):
    policy = build(qwen3()).eval()
    ids = torch.arange(1, 9)[None]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    mask = (torch.arange(11) >= 3).long()[None]
    with torch.no_grad():
        plain = policy.model(ids).logits
        behind_padding = policy.model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0)).logits
    torch.testing.assert_close(behind_padding[:, 3:], plain, rtol=0, atol=1e-5)
    policy.model.save_pretrained(tmp_path)
    again = Policy.from_pretrained(tmp_path)
    packed = collate(rows(), [0, 1])
    assert torch.equal(score(again, packed), score(policy, packed))


def test_lora_beside_the_head_trains_and_lora_on_the_head_is_refused():
    base = AutoModelForCausalLM.from_config(qwen3(tie_word_embeddings=False))
    policy = Policy(get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)))
    policy(collate(rows(), [0, 1]))[0].sum().backward()
    assert {name.split(".")[-3] for name, p in policy.named_parameters() if p.grad is not None} == {"lora_A", "lora_B"}
    base = AutoModelForCausalLM.from_config(qwen3(tie_word_embeddings=False))
    with pytest.raises(ConfigError, match="lm_head out"):
        Policy(get_peft_model(base, LoraConfig(target_modules=["lm_head"])))


def test_a_support_restricts_the_normalization():
    packed = collate(rows(), [0])
    own_token_only = (torch.arange(len(packed.target_ids_T) + 1), packed.target_ids_T)
    restricted = PackedBatch(
        **(
            {name: getattr(packed, name) for name in PackedBatch.__slots__}
            | {"support_offsets": own_token_only[0], "support_ids": own_token_only[1]}
        )
    )
    torch.testing.assert_close(score(build(qwen3()), restricted), torch.zeros(len(packed.target_ids_T)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=32), "attention interface"),
        (MambaConfig(num_hidden_layers=1, hidden_size=16, vocab_size=32), "takes no position ids"),
        (qwen3(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
    ],
)
def test_models_whose_rows_cannot_be_kept_apart_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build(config)


def test_an_encoder_decoder_is_refused_before_weights_are_read(tmp_path):
    BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is an encoder-decoder"):
        Policy.from_pretrained(tmp_path)


def test_a_head_that_is_not_plain_is_refused():
    model = AutoModelForCausalLM.from_config(qwen3(tie_word_embeddings=False))
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ConfigError, match="expected a plain"):
        Policy(model)


def test_a_model_that_changes_logits_after_the_head_is_refused():
    model = AutoModelForCausalLM.from_config(GraniteConfig(**(SIZES | {"logits_scaling": 8.0})))
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = scaled
    with pytest.raises(ConfigError, match="differ from the model's own forward"):
        Policy(model)


def test_an_unknown_attention_or_path_is_refused_with_the_choices(tmp_path):
    with pytest.raises(ConfigError, match="expected one of auto, packed_rows"):
        build(qwen3(), attn_implementation="flash")
    with pytest.raises(ConfigError, match="needs bfloat16"):
        build(qwen3(), attn_implementation="flash_attention_2")
    with pytest.raises(ConfigError, match="no loadable model config"):
        Policy.from_pretrained(tmp_path)
