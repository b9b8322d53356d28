"""What makes a decoder of transformers fit for packed rows, whether a policy or a critic stands on it.

    config ─► refuse what cannot be packed ─► weights ─► `prepare`: attention per row, no randomness, checkpointing,
                                                         compilation ─► `packed_hidden_states`

Shape legend: _L tokens of the pack, _D hidden size.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_flash_attn_2_available

from rollout.errors import ConfigError
from trainer.batch.packing import PackedBatch
from trainer.config.launcher import COMPILE_UNDER_ZERO3
from trainer.config.schema import ATTENTIONS
from trainer.model import packed_attention

AUTO = "auto"
"""Of `trainer.config.schema.ATTENTIONS`: FlashAttention-2 where it is installed and the weights are half precision on a
GPU, else `packed_rows`. `sdpa` and `eager` build an L × L mask per pack: exact, slow, for comparison."""

PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose only view of other tokens is attention that respects rows. Recurrent layers carry state over."""

_RANDOM = ("dropout", "drop_rate", "pdrop", "layerdrop", "jitter")
"""Parts of the names of config fields and module attributes that make a forward random."""


def packable_config(path: str | Path, *, setting: str, expected: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a model, before its weights are read.

    Args:
        path: directory or hub name.
        setting: that named it, for the error.
        expected: what else it can be, for the error.

    Raises:
        ConfigError: nothing loadable is there, or rows could not be kept apart in the model.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}={path}: no loadable model config ({error}). Expected {expected}") from error
    refuse_architecture(config)
    return config


def prepare(
    model: PreTrainedModel,
    *,
    attn_implementation: str,
    gradient_checkpointing: bool,
    compute_dtype: torch.dtype | str | None,
) -> None:
    """Set a model up for packs, in place: in train mode, which without randomness computes as eval mode does.

    Raises:
        ConfigError: its rows cannot be kept apart in a pack.
    """
    refuse_unpackable(model)
    packed_attention.register()
    model.set_attn_implementation(choose_attention(attn_implementation, model, compute_dtype))
    disable_randomness(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # `from_pretrained` leaves a model in eval mode, where transformers checkpoints nothing.
    model.train()


def compile_layers(model: nn.Module) -> None:
    """Compile each layer by itself, in place: names of parameters stay, and equal layers share one compilation.

    Lengths of packs are symbols, so a new length compiles nothing anew; attention and the fused head stay as they are.

    Raises:
        ConfigError: the weights are partitioned by ZeRO-3, or there are no layers that are known as such.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that transformers marks as such, so model.compile=true has nothing "
            "to compile; set model.compile=false"
        )
    if any("ds_shape" in vars(parameter) for parameter in model.parameters()):
        raise ConfigError(COMPILE_UNDER_ZERO3)
    packed_attention.hide_from_compiler()
    for layer in layers:
        layer.compile(dynamic=True)


def attention_of(model: PreTrainedModel) -> str:
    """Name of the attention implementation that the model computes with."""
    return str(model.config.get_text_config()._attn_implementation)


def can_share_prefixes(module: nn.Module) -> bool:
    """Whether packs of a policy, with or without a critic, may hold once what rows begin with
    (trainer/batch/prefixes.py)."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    return bool(models) and all(attention_of(model) == packed_attention.PACKED_ROWS for model in models)


def packed_hidden_states(decoder: PreTrainedModel, packed: PackedBatch) -> torch.Tensor:
    """(L, D): last hidden states of a decoder over a pack, each row as if it were alone."""
    attn_implementation = attention_of(decoder)
    is_packed_rows = attn_implementation == packed_attention.PACKED_ROWS
    assert packed.prefixes is None or is_packed_rows, "`can_share_prefixes` says so"
    arguments: dict[str, Any] = {}
    if is_packed_rows:
        arguments = {"attention_mask": packed_attention.no_mask(packed.ids.device), "packed": packed}
    elif attn_implementation.startswith("flash_attention"):
        longest = max(packed.row_lengths)
        arguments = {
            "cu_seq_lens_q": packed.cu_seqlens,
            "cu_seq_lens_k": packed.cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    # sdpa, eager: without a mask and a cache, transformers makes a block-causal mask where position ids restart.
    output = decoder(input_ids=packed.ids[None], position_ids=packed.position_ids[None], use_cache=False, **arguments)
    return output.last_hidden_state[0]


def refuse_architecture(config: PreTrainedConfig) -> None:
    """Raise ConfigError for what the config alone shows to be no packable decoder."""
    text = config.get_text_config()
    stored = config.to_dict().get("quantization_config")
    if stored is not None:
        method = stored.get("quant_method", "by an unknown method")
        raise ConfigError(
            f"the weights of this {config.model_type} model are quantised ({method}), and neither they nor adapters on "
            "them (QLoRA) can be trained: the engine is sent whole weights; set model.path to the unquantised model, "
            "with model.dtype=bfloat16 model.lora.rank=16 to save memory"
        )
    if config.is_encoder_decoder:
        raise ConfigError(
            f"model type {config.model_type} is an encoder-decoder; expected a decoder-only causal language model "
            "(for example Qwen3, Llama, Gemma, Mistral): set model.path to one"
        )
    unpackable = sorted(set(text.to_dict().get("layer_types") or ()) - PACKABLE_LAYERS)
    if unpackable:
        raise ConfigError(
            f"model type {config.model_type} has layers of type {', '.join(unpackable)}, in which rows of a pack would "
            f"see each other; expected only {' and '.join(sorted(PACKABLE_LAYERS))}: set model.path to such a model"
        )


def refuse_unpackable(model: PreTrainedModel) -> None:
    """Raise ConfigError unless rows of a pack can be kept apart in this model."""
    refuse_architecture(model.config)
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise ConfigError(
            f"{name} does not route its attention through transformers' attention interface, so rows of a pack cannot "
            "be kept apart; set model.path to a model that does (most decoders in transformers 5)"
        )
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise ConfigError(f"{name} takes no position ids, which must restart in each row of a pack")


def choose_attention(requested: str, model: PreTrainedModel, compute_dtype: torch.dtype | str | None = None) -> str:
    """The attention implementation to use for `requested`; compute_dtype: of mixed precision, else the weights'.

    Raises:
        ConfigError: an unknown name, or FlashAttention for weights it cannot compute with.
    """
    if requested not in ATTENTIONS:
        raise ConfigError(f"attn_implementation={requested}: expected one of {', '.join(ATTENTIONS)}")
    if isinstance(compute_dtype, str):
        compute_dtype = getattr(torch, compute_dtype)
    dtype = compute_dtype or model.dtype
    half = dtype in (torch.bfloat16, torch.float16)
    if requested == AUTO:
        flash = half and torch.cuda.is_available() and is_flash_attn_2_available() and model._supports_flash_attn
        return "flash_attention_2" if flash else packed_attention.PACKED_ROWS
    if requested.startswith("flash_attention") and not half:
        raise ConfigError(
            f"attn_implementation={requested} needs bfloat16 or float16, found {dtype}: "
            f"set model.dtype=bfloat16 or model.attn_implementation={packed_attention.PACKED_ROWS}"
        )
    return requested


def disable_randomness(model: nn.Module) -> None:
    """Set every dropout and jitter to 0, in modules and configs.

    Train mode is needed for gradient checkpointing, but log-probabilities must be those of the sampler, which has no
    dropout (ppo.md P4). Attention layers copy the probability into plain attributes, so `nn.Dropout` is not enough.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, *(value for value in vars(module).values() if isinstance(value, PreTrainedConfig))):
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and any(part in name for part in _RANDOM):
                    setattr(holder, name, 0.0)
