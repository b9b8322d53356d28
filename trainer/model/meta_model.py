"""The modules that a run would train, with their shapes and without their weights (torch's meta device)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from rollout.errors import ConfigError
from trainer.config.schema import Config
from trainer.model.critic import ActorCritic, Critic
from trainer.model.decoder import refuse_architecture
from trainer.model.lora import add_adapters
from trainer.model.policy import Policy


class Blueprint(NamedTuple):
    module: nn.Module
    """All that is trained: the policy, or policy and critic."""
    policy: Policy


def blueprint(config: Config) -> Blueprint:
    """Takes milliseconds for a model of any size.

    Raises `ConfigError` where the run itself would: no model is there, or one that cannot be a policy or critic.
    """
    model = config.model
    settings = {
        "attn_implementation": config.attention,
        "gradient_checkpointing": model.gradient_checkpointing,
        "compute_dtype": model.dtype,
    }
    with torch.device("meta"):
        shapes = _model_config(config, "model.path", model.path)
        causal_lm = AutoModelForCausalLM.from_config(shapes, trust_remote_code=model.trust_remote_code)
        policy = Policy(add_adapters(causal_lm, model.lora) if model.lora.rank else causal_lm, **settings)
        if not config.has_critic:
            return Blueprint(policy, policy)
        if model.critic == "shared":
            return Blueprint(ActorCritic.shared(policy), policy)
        shapes = _model_config(config, "model.critic_path", model.critic_path or model.path)
        decoder = AutoModel.from_config(shapes, trust_remote_code=model.trust_remote_code)
        return Blueprint(ActorCritic(policy, Critic(decoder, **settings)), policy)


def _model_config(config: Config, name: str, path: str) -> PreTrainedConfig:
    try:
        shapes = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}={path}: no loadable model config ({str(error).splitlines()[0]}); set {name}=<directory or hub id>"
        ) from error
    refuse_architecture(shapes)
    return shapes
