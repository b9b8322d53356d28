"""The modules that a run would train, with shapes but without weights (torch's meta device)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from trainer.config.schema import Config
from trainer.model.critic import ActorCritic, Critic
from trainer.model.decoder import decoder_setup, packable_config
from trainer.model.lora import add_adapters
from trainer.model.policy import Policy


class Blueprint(NamedTuple):
    module: nn.Module
    """All that is trained: the policy, or policy and critic."""
    policy: Policy


def blueprint(config: Config) -> Blueprint:
    """Build the trained modules on the meta device, in milliseconds for a model of any size.

    Raises `ConfigError` where the run itself would: no model at the path, or one that cannot be a policy or critic.
    """
    model, setup, trust = config.model, decoder_setup(config), config.model.trust_remote_code
    with torch.device("meta"):
        shapes = packable_config(model.path, setting="model.path", trust_remote_code=trust)
        causal_lm = AutoModelForCausalLM.from_config(shapes, trust_remote_code=trust)
        policy = Policy(add_adapters(causal_lm, model.lora) if model.lora.rank else causal_lm, **setup)
        if not config.has_critic:
            return Blueprint(policy, policy)
        if model.critic == "shared":
            return Blueprint(ActorCritic.shared(policy), policy)
        path = model.critic_path or model.path
        shapes = packable_config(path, setting="model.critic_path", trust_remote_code=trust)
        decoder = AutoModel.from_config(shapes, trust_remote_code=trust)
        return Blueprint(ActorCritic(policy, Critic(decoder, **setup)), policy)
