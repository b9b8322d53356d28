"""Preparation of a transformers decoder for packed rows, shared by policy and critic.

    config ─► refuse what cannot be packed ─► weights ─► `prepare`: layers per row, no randomness, checkpointing
                                                     ─► layers/compiled.py ─► `packed_hidden_states`

Shape legend: _L tokens of the pack, _D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lockstep.rollout.errors import ConfigError, TrainingError
from lockstep.rollout.models.stored_model import read_config
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.config.groups.model_settings import ATTENTIONS, ModelConfig
from lockstep.trainer.model.layers import (
    autocast,
    chunked_attention,
    experts,
    packed_attention,
    recurrent,
    rotary,
)
from lockstep.trainer.model.quantized_base import refuse_quantized

if TYPE_CHECKING:
    from lockstep.trainer.model.layers.vision import Vision

AUTO = "auto"
"""`packed_rows`, which chooses its kernels by device and dtype."""

CONDITIONAL = "ForConditionalGeneration"
"""End of the names of classes with a vision tower."""
OF_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Model types without a model of text in transformers, and those that compute text alike: without images the three
parts of their rotary positions are the same."""
PACKABLE_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "mamba", "hybrid", "conv", "mlp", "moe"}
)
"""Layer types, as transformers names them, whose rows can be kept apart in a pack: by attention, by
trainer/model/layers/recurrent.py, or because they do not mix tokens."""

_RANDOM = ("dropout", "drop_rate", "pdrop", "layerdrop")
"""Substrings of config fields and module attributes that make a forward pass random unless they are 0."""
_NOISY = "jitter"
"""Substring of attributes of modules that add noise in train mode. They may be more than noise: PhiMoE's router samples
experts in train mode, and in eval mode its jitter is the threshold between them."""


class DecoderSetup(TypedDict, total=False):
    """Optional arguments of `prepare`, passed through by policy and critic."""

    attn_implementation: str
    """One of `ATTENTIONS` of the settings, by default `auto`. `sdpa` and `eager` build an L × L mask per pack: exact
    but slow, for comparison."""
    gradient_checkpointing: bool
    """Keep only the inputs of layers between forward and backward."""
    compute_dtype: torch.dtype | str | None
    """Dtype of mixed precision, on which FlashAttention depends; None: dtype of the weights."""
    engine_context: int | None
    """Context of the engines that sample the rows [tokens], which rotary positions depend on; None without engines."""
    sees_images: bool
    """True for a model with its vision tower, whose packs may have images: every pack runs the tower (`Vision`)."""
    trains_tower: bool
    """Train the tower and its projector, too; by default they are frozen."""


def decoder_setup(model: ModelConfig, engine_context: int | None) -> DecoderSetup:
    return {
        "attn_implementation": model.attention,
        "gradient_checkpointing": model.is_checkpointed,
        "compute_dtype": model.dtype,
        "engine_context": engine_context,
        "sees_images": model.sees_images,
        "trains_tower": model.images.train_tower,
    }


def packable_config(
    path: str | Path,
    *,
    setting: str,
    trust_remote_code: bool,
    has_adapters: bool = False,
    sees_images: bool = False,
) -> PreTrainedConfig:
    """Load a model's config, before its weights are read.

    Args:
        setting: name of the path's setting, for the error.
        has_adapters: True if only adapters are trained, under which weights may be quantized.
        sees_images: True if the vision tower is loaded, too.

    Raises:
        ConfigError: no config can be loaded, the architecture cannot keep rows apart, or the weights are quantized.
    """
    config = read_config(path, setting=setting, trust_remote_code=trust_remote_code)
    refuse_quantized(config, setting=setting, has_adapters=has_adapters)
    refuse_architecture(config, sees_images=sees_images)
    return config


def prepare(
    model: PreTrainedModel,
    *,
    attn_implementation: str = AUTO,
    gradient_checkpointing: bool = False,
    compute_dtype: torch.dtype | str | None = None,
    engine_context: int | None = None,
    sees_images: bool = False,
    trains_tower: bool = False,
) -> None:
    """Set a model up for packs, in place, and leave it in train mode, which without randomness equals eval mode.

    Raises `ConfigError` if rows cannot be kept apart in a pack of this model.
    """
    refuse_architecture(model.config, sees_images=sees_images)
    chunked_attention.adapt(model)
    refuse_unpackable(model)
    packed_attention.register()
    recurrent.isolate_rows(model)
    rotary.isolate_rows(model, engine_context)
    autocast.cast_embeddings(model)
    experts.cast_experts(model)
    experts.keep_float32_routers(model)
    model.set_attn_implementation(choose_attention(attn_implementation, model, compute_dtype))
    disable_randomness(model)
    if sees_images and not trains_tower:
        from lockstep.trainer.model.layers.vision import freeze_tower  # models of text do not load it

        freeze_tower(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # `from_pretrained` leaves a model in eval mode, in which transformers ignores gradient checkpointing.
    model.train()


def vision_of(model: PreTrainedModel, **setup: Unpack[DecoderSetup]) -> Vision | None:
    """Return the vision tower of a model that sees images, after `prepare`."""
    if not setup.get("sees_images"):
        return None
    from lockstep.trainer.model.layers.vision import Vision

    return Vision(model)


def attention_of(model: PreTrainedModel) -> str:
    """Return the name of the model's attention implementation."""
    return str(model.config.get_text_config()._attn_implementation)


def compilable_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers marks, but for recurrent ones and those that call their experts themselves.

    Routers choose the tokens of each expert, which the compiler must not see (trainer/model/layers/compiled.py).
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [
        layer
        for layer in layers
        if not any(recurrent.recurrent_layers(layer)) and experts.EXPERTS not in dict(layer.named_children())
    ]


def can_share_prefixes(module: nn.Module) -> bool:
    """True if all models inside support packs with shared prefixes (trainer/batch/prefixes.py)."""
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    return bool(models) and all(
        attention_of(model) == packed_attention.PACKED_ROWS and not any(recurrent.recurrent_layers(model))
        for model in models
    )


def packed_hidden_states(
    decoder: PreTrainedModel, packed: PackedBatch, inputs: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """Return the (L, D) last hidden states of a pack, each row computed as if it were alone.

    inputs: embeddings of ids and images in place of the ids (`Vision.inputs`). Raises `TrainingError` for images
    without them.
    """
    if packed.images is not None and inputs is None:
        raise TrainingError(f"a pack has images, and {type(decoder).__name__} was loaded without its vision tower")
    attn_implementation = attention_of(decoder)
    is_packed_rows = attn_implementation == packed_attention.PACKED_ROWS
    assert packed.prefixes is None or is_packed_rows, "shared prefixes need packed_rows: see `can_share_prefixes`"
    arguments: dict[str, Any] = {}
    if is_packed_rows:
        arguments = {"attention_mask": packed_attention.no_mask(packed), "packed": packed}
    elif attn_implementation.startswith("flash_attention"):
        longest = max(packed.row_lengths)
        arguments = {
            "cu_seq_lens_q": packed.cu_seqlens,
            "cu_seq_lens_k": packed.cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    if any(recurrent.recurrent_layers(decoder)):
        arguments |= recurrent.row_arguments(packed)
    # sdpa, eager: without mask and cache, transformers builds a block-causal mask from restarting position ids.
    plain = {"input_ids": packed.ids[None], "position_ids": packed.position_ids[None]}
    output = decoder(**(plain if inputs is None else inputs), use_cache=False, **arguments)
    return output.last_hidden_state[0]


def refuse_architecture(config: PreTrainedConfig, *, sees_images: bool = False) -> None:
    """Raise ConfigError if the config alone shows that the model is not a packable decoder.

    sees_images: True if the vision tower is loaded, too.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise ConfigError(
            f"model type {config.model_type} is an encoder-decoder; expected a decoder-only causal language model "
            "(for example Qwen3, Llama, Gemma, Mistral): set model.path to one"
        )
    if sees_images:
        from lockstep.trainer.model.layers.vision import refuse_tower

        refuse_tower(config)
    elif "vision_config" in config.to_dict() and not _leaves_tower_out(config.model_type):
        is_known = text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or text.model_type in OF_TEXT
        remedy = "lockstep save-text-model <checkpoint> <directory>, and set model.path to the directory"
        raise ConfigError(
            f"model type {config.model_type} has a vision tower, without which transformers does not load it here; "
            + (f"save its text model: {remedy}" if is_known else "set model.path to a text model")
        )
    packable = PACKABLE_LAYERS | (
        {chunked_attention.CHUNKED} if text.model_type == chunked_attention.MODEL_TYPE else set()
    )
    unpackable = sorted(set(getattr(text, "layer_types", None) or ()) - packable)
    if unpackable:
        raise ConfigError(
            f"model type {config.model_type} has layers of type {', '.join(unpackable)}, whose rows cannot be kept "
            f"apart in a pack; expected only {', '.join(sorted(PACKABLE_LAYERS))}: set model.path to such a model"
        )


def _leaves_tower_out(model_type: str) -> bool:
    """Return True if the text model of a checkpoint with a vision tower loads without the tower's weights."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, CONDITIONAL)
    text_class = getattr(transformers, name, None)
    return not name.endswith(CONDITIONAL) and bool(getattr(text_class, "_keys_to_ignore_on_load_unexpected", None))


def refuse_unpackable(model: PreTrainedModel) -> None:
    """Raise ConfigError if the layers of the model cannot keep rows of a pack apart."""
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ConfigError(
            f"{name} does not route its attention through transformers' attention interface, so rows of a pack cannot "
            "be kept apart; set model.path to a model that does (most decoders in transformers 5)"
        )
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        raise ConfigError(
            f"{name} takes no position ids, which must restart in each row of a pack; set model.path to "
            "a model that does"
        )


def choose_attention(requested: str, model: PreTrainedModel, compute_dtype: torch.dtype | str | None) -> str:
    """Resolve the requested attention to an implementation. compute_dtype: see `DecoderSetup`.

    Raises `ConfigError` for an unknown name, or FlashAttention without half precision.
    """
    if requested not in ATTENTIONS:
        raise ConfigError(f"attn_implementation={requested}: expected one of {', '.join(ATTENTIONS)}")
    if isinstance(compute_dtype, str):
        compute_dtype = getattr(torch, compute_dtype)
    dtype = compute_dtype or model.dtype
    half = dtype in (torch.bfloat16, torch.float16)
    if requested == AUTO:
        return packed_attention.PACKED_ROWS
    if (
        requested != packed_attention.PACKED_ROWS
        and model.config.get_text_config().model_type == chunked_attention.MODEL_TYPE
    ):
        raise ConfigError(
            f"attn_implementation={requested}: in a pack it counts the chunks and positions of Llama 4 from the first "
            f"row; set model.attn_implementation={packed_attention.PACKED_ROWS}"
        )
    if requested != packed_attention.PACKED_ROWS and hasattr(model.config, "vision_config"):
        from lockstep.trainer.model.layers.vision import refuse_attention

        refuse_attention(requested, model)
    if requested.startswith("flash_attention") and not half:
        raise ConfigError(
            f"attn_implementation={requested} needs bfloat16 or float16, found {dtype}: "
            f"set model.dtype=bfloat16 or model.attn_implementation={packed_attention.PACKED_ROWS}"
        )
    return requested


def disable_randomness(model: nn.Module) -> None:
    """Set every dropout to 0, in modules and configs, and keep modules with jitter in eval mode.

    Gradient checkpointing needs train mode, but the sampler has no dropout, so neither may the trainer ("The N
    Implementation Details of RLHF with PPO", Hugging Face blog, 2023: dropout layers disabled). Attention layers copy
    the probability into plain attributes, so zeroing `nn.Dropout` is not enough.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if any(_NOISY in name for name in vars(module)):
            vars(module)["train"] = partial(_train_children, module)
            module.train()
        for holder in (module, *(value for value in vars(module).values() if isinstance(value, PreTrainedConfig))):
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and any(part in name for part in _RANDOM):
                    setattr(holder, name, 0.0)


def _train_children(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace `train` of a module that stays in eval mode."""
    module.training = False
    for child in module.children():
        child.train(mode)
    return module
