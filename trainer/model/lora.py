"""Low-rank adapters (LoRA, Hu et al. 2021): small matrices are trained while the model's weights stay frozen.

    y = W x + (alpha / rank) · B A x        A: rank × in, random; B: out × rank, zeros, so training begins at W

The engine gets merged weights (`rollout/weights/source.py`). A finished run leaves both: a merged model that
`from_pretrained` loads, and the adapter itself in `adapter/` beside its weights. The reference policy is the model with
adapters disabled.

Covered: linear layers of the decoder, in one process and under DDP, ZeRO-2 and ZeRO-3. Not covered: adapters on the
head or on an embedding tied to it (the engine holds one weight for both), on experts, DoRA, dropout (the sampler has
none).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from torch import nn
from transformers import PreTrainedModel

from rollout.errors import ConfigError
from trainer.config.schema import LoraConfig
from trainer.distributed.distributed import Distributed

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER_DIRECTORY = "adapter"
PEFT_REFUSES, PEFT_REFUSES_IN = frozenset({"out_proj", "conv1d"}), frozenset({"falcon_h1", "nemotron_h"})
"""Layers, and the model types in which peft refuses adapters on them."""
OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of the layers of an expert in checkpoints. peft 0.21 adapts stacked experts in place of them."""


def is_adapted(model: nn.Module) -> TypeGuard[PeftModel]:
    """True if the model has adapters. Does not import peft, which takes seconds."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def add_adapters(model: PreTrainedModel, settings: LoraConfig) -> PeftModel:
    """Insert trainable adapters into the model and freeze everything else.

    Raises `ConfigError` if `target_modules` names something that is not a linear layer, or the head.
    """
    import peft

    wanted = settings.target_modules
    if wanted is not None:
        _check_targets(model, wanted)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number works: peft only divides it by the rank
            lora_dropout=0.0,
            target_modules=default_targets(model) if wanted is None else list(wanted),
            task_type="CAUSAL_LM",
        ),
    )
    assert isinstance(adapted, peft.PeftModel)
    return adapted


def default_targets(model: PreTrainedModel) -> str | list[str]:
    """Return the linear layers that get adapters unless `model.lora.target_modules` names others.

    All but the head; without those that peft 0.21 refuses in Mamba-2 layers, and without the names of experts' layers
    in a mixture of experts, which peft would take for stacked experts, of which the engine is sent parts.
    """
    left_out = PEFT_REFUSES if model.config.get_text_config().model_type in PEFT_REFUSES_IN else frozenset()
    if any(".experts." in name for name, _ in model.named_parameters()):
        left_out |= OF_EXPERTS
    if not left_out:
        return "all-linear"  # excludes the head
    return sorted(_linear_names(model) - left_out)


def _linear_names(model: PreTrainedModel) -> set[str]:
    """Return the last parts of the names of all linear layers but the head."""
    head = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    return {name.rpartition(".")[2] for name in linear}


def _check_targets(model: PreTrainedModel, wanted: list[str]) -> None:
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in wanted:
        matching = [name for name in linear if name == target or name.endswith(f".{target}")]
        if OF_EXPERTS & {target} and any(".experts." in name for name, _ in model.named_parameters()):
            raise ConfigError(
                f"model.lora.target_modules={wanted}: {target} names layers of experts, which {type(model).__name__} "
                "stacks in one tensor, and adapters on them cannot be sent to the engine; leave it out"
            )
        if not matching:
            raise ConfigError(
                f"model.lora.target_modules={wanted}: {type(model).__name__} has no linear layer named {target}; "
                f"it has {', '.join(sorted(_linear_names(model)))}"
            )
        if any(linear[name] is head for name in matching):
            raise ConfigError(
                f"model.lora.target_modules={wanted} names the head, which the fused log-probabilities need unadapted; "
                f"leave {target} out"
            )


def save_merged(model: PeftModel, directory: Path, distributed: Distributed) -> None:
    """Write the model with merged adapters, as the engine gets it, and the adapter beside it; a collective."""
    from rollout.weights.source import ZeroSource  # here: it imports vLLM, which takes seconds

    merged = {name: tensor.cpu() for name, tensor in ZeroSource(model, readers=[0])}
    adapters = nn.ParameterList(parameter for parameter in model.parameters() if parameter.requires_grad)
    with distributed.whole_parameters(adapters):
        if distributed.is_main:
            model.get_base_model().save_pretrained(directory, state_dict=merged)  # type: ignore[operator]
            model.save_pretrained(str(directory / ADAPTER_DIRECTORY), save_embedding_layers=False)
