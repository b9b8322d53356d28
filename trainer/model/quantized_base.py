"""Quantized weights under adapters (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

The engine computes with the checkpoint as it is stored, in few bits and with the kernels of its method. The trainer
reads the same numbers dequantized and frozen, and trains adapters on them. Only adapters travel. What is left between
the two is the engine's rounding of activations; it is measured in the first step, as in quantized rollouts.

Covered: checkpoints of the methods below, in one process, under DDP and ZeRO-2. Not covered: bitsandbytes (NF4), which
vLLM 0.32 does not load, GPTQ and AWQ, which transformers does not dequantize; ZeRO-3, critics and references with
quantized weights. The trainer holds the dequantized weights, so its own memory does not shrink.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils.quantization_config import CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

from lockstep.rollout.errors import ConfigError

METHODS: dict[str, Any] = {
    "compressed-tensors": CompressedTensorsConfig,
    "fp8": FineGrainedFP8Config,
    "mxfp4": Mxfp4Config,
}
"""Methods that vLLM loads and transformers dequantizes, with the class of their settings."""


def stored_method(config: PreTrainedConfig) -> str | None:
    """Return the method by which a checkpoint's weights are quantized; None: they are not."""
    quantization = config.to_dict().get("quantization_config")
    return None if quantization is None else str(quantization.get("quant_method", "by an unknown method"))


def method_at(path: str | Path, *, trust_remote_code: bool) -> str | None:
    """Return `stored_method` of the checkpoint at a directory or hub id, whose config must be loadable."""
    return stored_method(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))


def refuse_quantized(config: PreTrainedConfig, *, setting: str, has_adapters: bool) -> None:
    """Raise `ConfigError` for quantized weights, except under adapters and by a method of `METHODS`.

    setting: name of the path's setting. has_adapters: True for a policy with `model.lora.rank` above 0.
    """
    method = stored_method(config)
    if method is None or (method in METHODS and has_adapters):
        return
    cause = f"the weights of this {config.model_type} model are quantized ({method})"
    if setting != "model.path":
        raise ConfigError(f"{cause}, and only those of a policy may be; set {setting} to an unquantized model")
    if method in METHODS:
        raise ConfigError(
            f"{cause}, and only adapters on them can be trained (QLoRA); set model.lora.rank=16, or model.path to the "
            "unquantized model"
        )
    raise ConfigError(
        f"{cause}, and adapters on them (QLoRA) need a method that vLLM loads and transformers dequantizes: "
        f"{', '.join(METHODS)}; set model.path to a checkpoint of one of these, or to the unquantized model with "
        "model.dtype=bfloat16 model.lora.rank=16 to save memory"
    )


def loading_arguments(config: PreTrainedConfig) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that dequantize the checkpoint of this config; none if it is not quantized.

    Raises `ConfigError` under ZeRO-3.
    """
    method = stored_method(config)
    if method is None:
        return {}
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            f"the weights of this {config.model_type} model are quantized ({method}), and under ZeRO-3 they cannot be "
            "dequantized in parts; launch with configs/accelerate/zero2.yaml or ddp.yaml"
        )
    return {"quantization_config": METHODS[method](dequantize=True)}
