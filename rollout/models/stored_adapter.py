"""The matrices of a LoRA adapter in its files, compared with those that peft gives a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.stored_model import is_finite, named, reason

if TYPE_CHECKING:
    from peft import PeftModel


def read_adapter(path: str, *, setting: str, model: PeftModel) -> dict[str, torch.Tensor]:
    """Read the matrices of an adapter. model: with adapters of the same settings, whose values may have no memory.

    Raises `ConfigError` if the files cannot be read, have other matrices than the model, or values that are not finite.
    """
    import peft

    try:
        tensors: dict[str, torch.Tensor] = peft.load_peft_weights(path, device="cpu")
    except Exception as error:  # of many kinds for damaged files
        raise ConfigError(
            f"{setting}={path} has no adapter that peft reads ({reason(error)}); set it to a directory with "
            "adapter_config.json and adapter_model.safetensors, such as <run>/model/adapter"
        ) from error
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes, wanted = ({name: one.shape for name, one in each.items()} for each in (tensors, expected))
    if shapes != wanted:
        other = {name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)}
        layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
        remedy = f"model.lora.target_modules=[{','.join(layers)}]" if setting == "model.lora.path" else setting
        raise ConfigError(
            f"{setting}={path} adapts other layers, or layers of another model, than model.path and its settings name "
            f"({named(other)}): set {remedy}{'' if layers else ' to an adapter with matrices'}"
        )
    if bad := [name for name, one in tensors.items() if not (one.is_floating_point() and is_finite(one))]:
        raise ConfigError(
            f"{setting}={path}: {len(bad)} tensor(s) are not of finite numbers ({named(bad)}); restore its files, or "
            f"set {setting} to another adapter"
        )
    return tensors
