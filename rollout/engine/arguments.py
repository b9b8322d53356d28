"""Arguments of vLLM's engine that depend on the device and on the model's layers."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.stored_model import GROUPS

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache on a CPU, the least that its attention takes."""
EXTENSION = "lockstep.rollout.weights.whole.heard_logits.HeardLogits"
"""Methods of vLLM's workers for `collective_rpc`."""
BATCH_TOKENS = 8192
"""Tokens of a batch of the engine, in which it also splits longer prompts on a GPU. vLLM's default is 2,048."""
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "hybrid", "conv"})
"""Types of layers that carry a state from token to token, as transformers names them (`layer_types`)."""
CPU_EXPERT_WIDTH = 32
UNLIMITED = (0.0, float("inf"))
MALLOC, KEEP_FREED = "GLIBC_TUNABLES", f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**40}"
"""Settings of malloc for engines that get weights over gloo, all on a CPU, unless users have their own: keep what is
freed. With malloc's defaults, the memory of staged weights and of each layer that is loaded goes back to the system
after each sync, and allocating it again takes most of the time of the next one (docs/performance.md)."""

CPU_SCHEMES = ("fp8_per_channel",)
"""Those for which its CPU build has kernels."""


def engine_arguments(settings: EngineSettings, *, is_cpu: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments for this device and the settings' model.

    Raises `ConfigError` if vLLM needs a package for the model that is not installed, computes it in another way, or
    cannot quantize it on this device.
    """
    path, dtype, context = settings.model, settings.dtype, settings.vllm_context
    arguments: dict[str, Any]
    if is_cpu:
        arguments = {
            # A partial prefill of a request with a seed kills the CPU worker, so a whole prompt must fit one step.
            "max_num_batched_tokens": None if context is None else max(context, BATCH_TOKENS),
            "enable_chunked_prefill": False,
            # vLLM's 128 would compute most of a prompt again for each sample of its group: whole blocks are shared.
            "block_size": CPU_BLOCK_TOKENS,
        }
    else:
        arguments = {"max_num_batched_tokens": BATCH_TOKENS}
    arguments["worker_extension_cls"] = EXTENSION
    if settings.adapters is not None:
        arguments |= settings.adapters.arguments()
    if (quantization := settings.quantization) is not None:
        if is_cpu and (quantization not in CPU_SCHEMES or dtype != "bfloat16"):
            raise ConfigError(
                f"rollout.quantization={quantization} with model.dtype={dtype}: on a CPU vLLM quantizes bfloat16 "
                f"weights by {', '.join(CPU_SCHEMES)} only; set rollout.quantization={CPU_SCHEMES[0]} "
                "model.dtype=bfloat16"
            )
        arguments["quantization"] = quantization
    overrides: dict[str, Any] = {}
    if not is_cpu and dtype != "float32":
        # The trainer's logits are float32. Logits of 16 to 32 have steps of 0.125 in bfloat16.
        overrides["head_dtype"] = "float32"
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError):  # vLLM reads it again, and says what is wrong
        config = PreTrainedConfig()
    text = config.get_text_config()
    layers = frozenset(getattr(text, "layer_types", None) or ())
    if is_cpu and layers & RECURRENT_LAYERS:
        # vLLM 0.32 caches recurrent states between the chunks of a prompt, and here a prompt is one chunk.
        arguments["enable_prefix_caching"] = False
    if is_cpu and getattr(text, "kv_lora_rank", None):
        # With AMX vLLM takes a backend that fails in float32, and in bfloat16 releases a weight that syncs load into.
        arguments["attention_backend"] = "CPU_MLA"
    if "conv" in layers:
        # LFM2's sizes under the names that vLLM reads, which checkpoints of transformers 5 do not have.
        overrides |= {"conv_dim": text.hidden_size, "block_dim": text.hidden_size}
    overrides |= _as_transformers(path, text, is_cpu=is_cpu)
    if hasattr(config, "vision_config"):
        # Without images the vision tower is left out.
        arguments["limit_mm_per_prompt"] = {"image": settings.max_images, "video": 0}
        if settings.max_images:
            # Each request brings its tensors, and they are normalized already.
            arguments |= {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0}
    if config.model_type == "gemma3" and settings.max_images:
        if text.sliding_window < config.mm_tokens_per_image:
            raise ConfigError(
                f"{path} has images of {config.mm_tokens_per_image} tokens and a window of {text.sliding_window}: in "
                "vLLM the tokens of such an image do not attend to all of it, in the trainer they do; set model.path "
                "to another model"
            )
        if is_cpu:  # the repair of its attention (`cpu_image_attention.py`) needs whole prompts
            arguments["enable_prefix_caching"] = False
    is_multimodal = hasattr(config, "vision_config") or text.model_type.startswith("qwen3_5")
    if is_multimodal and find_spec("torchvision") is None:
        raise ConfigError(
            f"vLLM imports torchvision for model type {config.model_type}, also without images, and it is not "
            "installed: pip install torchvision, on a machine without a GPU with "
            "--index-url https://download.pytorch.org/whl/cpu"
        )
    if text.model_type == "llama4_text":
        # vLLM scales queries only for contexts above 32,768 tokens, unless the generation config says otherwise.
        arguments["override_generation_config"] = {"attn_temperature_tuning": bool(text.attn_temperature_tuning)}
        if is_cpu and text.attention_chunk_size % CPU_BLOCK_TOKENS:
            raise ConfigError(
                f"{path} attends in chunks of {text.attention_chunk_size} tokens, and vLLM needs a multiple of "
                f"{CPU_BLOCK_TOKENS} on a CPU; set attention_chunk_size to one in its config.json, or model.path to "
                "another model"
            )
    if text.model_type == "olmoe" and text.norm_topk_prob:
        raise ConfigError(
            f"{path} normalizes the weights of the chosen experts (norm_topk_prob=true), which vLLM does not do for "
            "OLMoE; set model.path to a checkpoint with norm_topk_prob=false, as the published ones are"
        )
    return {**arguments, "hf_overrides": overrides} if overrides else arguments


def _as_transformers(path: str | Path, text: PreTrainedConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Return the overrides of a config with which vLLM computes the model as transformers does.

    Raises `ConfigError` with the value that vLLM reads in another way, if there are none.
    """
    values = text.to_dict()
    rope = values.get("rope_parameters") or {}
    experts = [values.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")]
    has_experts = any(experts) and "moe" in (values.get("layers_block_type") or ["moe"])  # Nemotron-H names its layers
    width = values.get("moe_intermediate_size") or values.get("intermediate_size")
    others = {  # value: what vLLM does with it
        "router_jitter_noise": ("is 0.01", text.model_type == "phimoe" and values["router_jitter_noise"] != 0.01),
        "use_bias": ("is false", text.model_type.startswith("ernie4_5") and values["use_bias"]),
        "mamba_n_groups": (
            "normalizes each group, transformers the whole width",
            text.model_type == "granitemoehybrid" and values["mamba_n_groups"] > 1,
        ),
        "time_step_limit": ("is [0, inf]", tuple(values.get("time_step_limit") or UNLIMITED) != UNLIMITED),
    }
    for name, (other, differs) in others.items():
        if differs:
            raise ConfigError(
                f"{path} has {name}={values[name]} in its config.json, which in vLLM {other}: engine and trainer would "
                "compute other models; set model.path to another one"
            )
    if is_cpu and has_experts and isinstance(width, int) and width % CPU_EXPERT_WIDTH:
        raise ConfigError(
            f"{path} has experts of width {width}, and vLLM's CPU kernel takes multiples of {CPU_EXPERT_WIDTH}; "
            "sample on a GPU, or set model.path to another model"
        )
    overrides: dict[str, Any] = {name: 1 for name in GROUPS if name in values and values[name] is None}
    if text.model_type == "cohere2" and values.get("sliding_window"):
        overrides["sliding_window"] = values["sliding_window"] - 1  # to which vLLM adds 1
    if rope.get("llama_4_scaling_beta"):  # scales queries by position; vLLM reads it under Mistral's own name
        overrides["llama_4_scaling"] = {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        }
    return overrides


def engine_variables(settings: EngineSettings, *, is_cpu: bool) -> dict[str, str]:
    """Return environment variables of an engine's processes, for what it computes and its main memory.

    Raises `ConfigError` for batch invariance on a CPU.
    """
    if is_cpu and settings.batch_invariant:
        raise ConfigError(
            "rollout.batch_invariant=true: vLLM has batch-invariant kernels for GPUs only; set "
            "rollout.batch_invariant=false"
        )
    variables = {"VLLM_BATCH_INVARIANT": "1"} if settings.batch_invariant else {}
    if settings.weight_transfer_backend == "gloo" and MALLOC not in os.environ:
        variables[MALLOC] = KEEP_FREED
    return variables
