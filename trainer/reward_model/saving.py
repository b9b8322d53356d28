"""A trained reward model on disk: gain and bias folded into the weights, as far as they can hold them.

The gain goes into the head's weight. The bias goes into the head's bias where there is one; else, for decoders whose
last operation before the head is a LayerNorm with a bias (GPT-2 and its kin), into that: adding b · w / |w|² to it adds
b to every score w · h. Models with RMSNorm have no place for it: there `AutoModelForSequenceClassification` gives
rewards that are lower by a constant, which `reward_normalization.json` holds and `rewards/model/classifier.py` adds.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from rewards.model.classifier import NORMALIZATION_FILE, RewardModel
from trainer.distributed.distributed import Distributed
from trainer.reward_model.normalization import Normalization


def save(
    directory: Path,
    module: RewardModel,
    normalization: Normalization,
    tokenizer: PreTrainedTokenizerFast,
    distributed: Distributed,
) -> None:
    """Write weights, tokenizer and normalisation; a collective."""
    distributed.save_pretrained(directory, edit=lambda state: fold(state, module, normalization))
    if not distributed.is_main:
        return
    tokenizer.save_pretrained(directory)
    left = 0.0 if bias_place(module) is not None else normalization.bias
    record = {**asdict(normalization), "remaining_bias": left}
    (directory / NORMALIZATION_FILE).write_text(json.dumps(record, indent=2) + "\n")


def fold(state: dict[str, Tensor], module: RewardModel, normalization: Normalization) -> dict[str, Tensor]:
    """The state dict of `module.model` with gain and, where there is a place, bias inside. In float64, then rounded."""
    weight = state["score.weight"].double() * normalization.gain
    folded = {**state, "score.weight": weight.to(state["score.weight"].dtype)}
    place = bias_place(module)
    if place == "score.bias":
        moved = state[place].double() * normalization.gain + normalization.bias
        folded[place] = moved.to(state[place].dtype)
    elif place is not None:
        direction = weight[0] / weight[0].square().sum()
        folded[place] = (state[place].double() + normalization.bias * direction).to(state[place].dtype)
    return folded


def bias_place(module: RewardModel) -> str | None:
    """Name of the parameter that can hold a bias of the score, or None."""
    head = module.model.get_submodule("score")
    if isinstance(head, nn.Linear) and head.bias is not None:
        return "score.bias"
    trunk = module.model.base_model
    norms = [
        name for name, child in trunk.named_children() if isinstance(child, nn.LayerNorm) and child.bias is not None
    ]
    # The last one that is a child of the trunk itself: those of layers are below, that of embeddings comes first.
    return f"{module.model.base_model_prefix}.{norms[-1]}.bias" if norms else None
