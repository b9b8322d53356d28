"""Sizes of a model, before or after it is loaded, and the arithmetic of an update (`perf/mfu`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from lockstep.rollout.models.stored_model import language_model
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.model.decoder import compilable_layers, decoder_setup, packable_config
from lockstep.trainer.model.layers.router_outputs import router_coefs
from lockstep.trainer.model.layers.routing import num_experts
from lockstep.trainer.model.policy import Policy

if TYPE_CHECKING:
    from lockstep.trainer.model.layers.vision import TowerShape

OF_LAYERS = re.compile(r"^(?!.*vision).*\.layers\.")
"""Names of the parameters of decoder layers, not of a tower's."""
NORM, OF_HEADS = re.compile(r"norm\w*\.weight$"), re.compile(r"\.[qk]_(layer)?norm\.")
"""Names of the weights of norms, and those of queries and keys among them."""
SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
"""Names of the width of shared experts in configs that do not count them (`n_shared_experts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that determine a model's memory and arithmetic."""

    parameters: int
    """Number of parameters of the trained module, including a critic's."""
    trained: int
    """Number of parameters with gradients: with LoRA, the adapters'."""
    engine_parameters: int
    """Number of parameters of the policy alone, as the engine holds it."""
    largest: int
    """Elements of the largest parameter, usually the embedding."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the part of an MLP that computes all tokens: in a mixture of experts of its shared ones."""
    attention: int
    """Width of all query heads together."""
    key_value: int
    """Width of all key heads together."""
    vocabulary: int
    is_tied: bool
    """True if the head's weight is the embedding."""
    experts: int = 0
    """Routed experts of a layer, of which a token uses some; 0: a dense model."""
    chosen: int = 0
    """Experts of a token in a layer."""
    expert: int = 0
    """Width of an expert."""
    norms: int = 2
    """Norms of hidden states in a layer."""
    has_head_norms: bool = False
    """True if queries and keys are normalized before the rotation."""
    compilable: int = 0
    """Layers of the policy that `model.compile` can compile."""
    tower: TowerShape | None = None
    """Vision tower of a model that sees images."""

    @property
    def of_layers(self) -> int:
        """Number of parameters without embedding and head."""
        return self.parameters - self.vocabulary * self.hidden * (1 if self.is_tied else 2)

    @classmethod
    def of_trained(cls, module: nn.Module, policy: Policy) -> ModelShape:
        """Measure the trained module. policy: the one inside it."""
        shape = cls.of(module, policy.model, policy.causal_lm.config)
        if policy.vision is None:
            return shape
        from lockstep.trainer.model.layers.vision import TowerShape  # models of text do not load it

        return replace(shape, tower=TowerShape.of(policy.causal_lm))

    @classmethod
    def of(cls, module: nn.Module, policy: nn.Module, config: PreTrainedConfig) -> ModelShape:
        """Measure a model. module: all that is trained; policy: the part that samples; config: of the policy."""
        decoder = config.get_text_config()
        # Some configs use other names (GPT-2: n_head) and map the common ones to them.
        text = decoder.to_dict() | {name: getattr(decoder, name) for name in decoder.attribute_map}
        text = {name: _largest(value) for name, value in text.items()}
        layers = decoder.num_hidden_layers  # which some derive from a list of layers
        heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // heads
        width = text.get("intermediate_size") or 4 * text["hidden_size"]
        experts = num_experts(config)
        expert = (text.get("moe_intermediate_size") or width) if experts else 0
        shared = next((text[name] for name in SHARED_WIDTHS if text.get(name)), None)
        sizes = [_numel(parameter) for parameter in module.parameters()]
        norms = [name for name, _ in policy.named_parameters() if OF_LAYERS.search(name) and NORM.search(name)]
        of_heads = [name for name in norms if OF_HEADS.search(name)]
        return cls(
            parameters=sum(sizes),
            trained=sum(_numel(parameter) for parameter in module.parameters() if parameter.requires_grad),
            engine_parameters=sum(_numel(parameter) for parameter in policy.parameters()),
            largest=max(sizes),
            layers=layers,
            hidden=text["hidden_size"],
            intermediate=(shared or expert * (text.get("n_shared_experts") or 0)) if experts else width,
            attention=heads * head_dim,
            key_value=(text.get("num_key_value_heads") or heads) * head_dim,
            vocabulary=text["vocab_size"],
            is_tied=bool(config.tie_word_embeddings),
            experts=experts,
            chosen=int(text.get("num_experts_per_tok") or 0) if experts else 0,
            expert=expert,
            norms=round((len(norms) - len(of_heads)) / layers) or 2,
            has_head_norms=bool(of_heads),
            compilable=len(compilable_layers(policy)),
        )


def _largest(value: Any) -> Any:
    """Return the largest number of a list with one per layer (Gemma 3n's widths, Hunyuan's experts), or the value."""
    is_per_layer = isinstance(value, list) and value and all(type(number) is int for number in value)
    return max(value) if is_per_layer else value


def planned_shape(
    model: ModelConfig, algorithm: AlgorithmConfig, *, has_critic: bool = False, engine_context: int | None = None
) -> ModelShape:
    """Measure the modules that a run would train, on the meta device: in milliseconds, without reading weights.

    Raises `ConfigError` where the run itself would: no model at a path, one that cannot be a policy or critic, or one
    without the routers that `algorithm` has losses for. engine_context: as in `DecoderSetup`.
    """
    setup, trust = decoder_setup(model, engine_context), model.trust_remote_code
    with torch.device("meta"):
        shapes = packable_config(
            model.path,
            setting="model.path",
            trust_remote_code=trust,
            has_adapters=model.lora.rank > 0,
            sees_images=model.sees_images,
        )
        auto = language_model(sees_images=model.sees_images).auto
        causal_lm = auto.from_config(shapes, trust_remote_code=trust)
        if model.lora.rank:
            from lockstep.trainer.model.lora import add_adapters

            causal_lm = add_adapters(causal_lm, model.lora)
        policy = Policy(causal_lm, **setup)
        router_coefs(policy.causal_lm.get_decoder(), algorithm)
        if not has_critic:
            return ModelShape.of_trained(policy, policy)
        from lockstep.trainer.model.critic import ActorCritic, Critic

        if model.critic == "shared":
            module = ActorCritic.shared(policy)
        else:
            path = model.critic_path or model.path
            shapes = packable_config(
                path, setting="model.critic_path", trust_remote_code=trust, sees_images=model.sees_images
            )
            decoder = AutoModel.from_config(shapes, trust_remote_code=trust)
            module = ActorCritic(policy, Critic(decoder, **setup))
    return ModelShape.of_trained(module, policy)


def update_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Return the FLOPs that one forward and backward pass over rows of these lengths needs.

    Per token and parameter: 2 forward, 2 backward for the inputs' gradient, and 2 for the parameter's if it is trained
    (Kaplan et al. 2020, arXiv:2001.08361). Attention has two products, scores and values: per layer, unit of width and
    pair of tokens 4 forward and 8 backward, of which the causal mask needs half (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).

    Not counted: recomputation under gradient checkpointing, scoring passes. Not covered: mixtures of experts (runs
    report nothing for them), layers that do not attend to the whole row.
    """
    looked_up = 0 if shape.is_tied else shape.vocabulary * shape.hidden  # an untied embedding multiplies nothing
    is_embedding_trained = shape.trained == shape.parameters
    per_token = 4.0 * (shape.parameters - looked_up) + 2.0 * (shape.trained - looked_up * is_embedding_trained)
    pairs = sum(float(length) ** 2 for length in lengths)
    return per_token * sum(lengths) + 6.0 * shape.layers * shape.attention * pairs


def _numel(parameter: nn.Parameter) -> int:
    """Return the full size of a parameter; under ZeRO-3 only `ds_numel` has it."""
    return int(vars(parameter).get("ds_numel", parameter.numel()))
