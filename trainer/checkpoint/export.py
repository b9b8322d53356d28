"""Model of a checkpoint as a directory for `from_pretrained`, on one process, from the state of any ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from lockstep.rollout.errors import CheckpointError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import language_model
from lockstep.trainer.checkpoint.checkpoint import MANIFEST
from lockstep.trainer.checkpoint.stored import UNREADABLE
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.distributed.sharding import PARAMETERS
from lockstep.trainer.distributed.unsharded_state import open_state


def export_model(checkpoint: Path, settings: ModelConfig, directory: Path, *, has_critic: bool) -> None:
    """Write the policy of a complete checkpoint, which is not one of adapters, without code of the model's directory.

    settings: of the run. Raises `ConfigError` if it cannot be loaded, `CheckpointError` if the checkpoint is of
    another model, or of ZeRO ranks with a critic, whose shards are not read here.
    """
    role, path = language_model(sees_images=settings.sees_images), settings.path
    model = load_model(role, path, setting="model.path", dtype="float32", trust_remote_code=False)
    prefix = "policy.model." if has_critic else "model."
    parameters = {f"{prefix}{name}": parameter for name, parameter in model.named_parameters()}
    zero_stage = json.loads((checkpoint / MANIFEST).read_text())["zero_stage"]
    try:
        if zero_stage:
            state = open_state(checkpoint, trained=list(parameters), zero_stage=zero_stage)
            tensors = {name: state(name).weight for name in parameters}
        else:
            weights = safe_open(checkpoint / PARAMETERS, framework="pt")
            tensors = {name: weights.get_tensor(name) for name in parameters}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
    except UNREADABLE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{checkpoint} does not fit {path}: {error}; let the run end") from error
    model.save_pretrained(directory)
