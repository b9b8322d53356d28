"""Load models on this rank in bfloat16, and write DIRECTORY/rank<N>.json: wrong buffers, and what was refused.

Started by tests/integration/test_loading.py through `accelerate launch`. DIRECTORY/families holds sound models,
DIRECTORY/faults broken ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.models.computed_buffers import wrong_buffer
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import LANGUAGE_MODEL, NEW_REWARD_MODEL
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.critic import ActorCritic, Critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.optimizers.optimizer import make_optimizer

DTYPE = "bfloat16"
TRAINED = ("gemma3", "falcon_h1", "minimax_m2")
"""Families whose policy, critic and reference are prepared as in a run."""


def differences(module: nn.Module, directory: Path, distributed: Distributed) -> list[str]:
    """Return the buffers that are not a new module's, or not those of a plain load."""
    wrong = [found for one in models(module) if (found := wrong_buffer(one)) is not None]
    with distributed.whole_models():
        plain = load_model(
            LANGUAGE_MODEL, directory, setting="model.path", dtype=torch.float32, trust_remote_code=False
        )
    for path, value in plain.base_model.named_buffers():
        for one in models(module):
            found = one.get_buffer(path)
            if found.dtype != value.dtype or not torch.equal(found.cpu(), value):
                wrong.append(f"{path}: {found.dtype}, {found.flatten()[:2].tolist()}, {value.flatten()[:2].tolist()}")
    return wrong


def models(module: nn.Module) -> list:
    """Return the trunks inside of a module."""
    if isinstance(module, ActorCritic):
        return [*models(module.policy), module.critic.decoder]  # type: ignore[list-item]
    return [module.causal_lm.base_model] if isinstance(module, Policy) else [module.base_model]  # type: ignore[union-attr]


def main(directory: Path) -> None:
    distributed = Distributed.start(dtype=DTYPE, max_grad_norm=1.0)
    wrong: dict[str, list[str]] = {}
    for place in sorted((directory / "families").iterdir()):
        if place.name not in TRAINED:
            role = NEW_REWARD_MODEL if place.name == "qwen3" else LANGUAGE_MODEL
            model = load_model(role, place, setting="model.path", dtype=torch.float32, trust_remote_code=False)
            wrong[place.name] = differences(model, place, distributed)
            continue
        module = ActorCritic(Policy.from_pretrained(place, compute_dtype=DTYPE), Critic.from_pretrained(place))
        optimizer = make_optimizer(module, OptimizerConfig(), is_sharded=distributed.zero_stage > 0)
        distributed.prepare(module, optimizer)
        wrong[place.name] = differences(distributed.unwrapped, place, distributed)
        dtype = torch.bfloat16 if distributed.uses_deepspeed else torch.float32
        copy = Policy.from_pretrained(place, dtype=dtype, compute_dtype=DTYPE)
        distributed.prepare_frozen(copy)
        wrong[f"reference of {place.name}"] = differences(copy, place, distributed)
    refused = {}
    for place in sorted((directory / "faults").iterdir()):
        try:
            Policy.from_pretrained(place)
        except ConfigError as error:
            refused[place.name] = str(error)
    report = {"stage": distributed.zero_stage, "wrong": wrong, "refused": refused}
    (directory / f"rank{distributed.rank}.json").write_text(json.dumps(report))
    distributed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
