"""The reward model: made from a pretrained trunk, normalized, and saved with its normalization folded in.

The gain goes into the head's weight. The bias goes into the head's bias if it has one; else, for decoders whose last
operation before the head is a LayerNorm with a bias (GPT-2 and similar), into that: adding b · w / |w|² to it adds b to
every score w · h. Models with RMSNorm cannot hold a bias: their `AutoModelForSequenceClassification` gives rewards that
are lower by a constant, which `reward_normalization.json` holds and `rewards/model/classifier.py` adds.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from lockstep.lab.reward_model.config import RewardModelConfig
from lockstep.rewards.model.classifier import NORMALIZATION_FILE, RewardModel
from lockstep.rollout.errors import ConfigError, TrainingError
from lockstep.rollout.models.loading import load_model
from lockstep.rollout.models.stored_model import NEW_REWARD_MODEL, REWARD_MODEL, read_config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.decoder import disable_randomness
from lockstep.trainer.objective.whitening import moments


def make_model(config: RewardModelConfig, distributed: Distributed, *, pad_token_id: int | None) -> RewardModel:
    """Load a sequence classifier with one output, under a new head or its own, without dropout.

    Raises:
        ConfigError: nothing loadable at the path, or no sequence classifier with a plain head.
    """
    settings = config.model
    source = {"setting": "model.path", "trust_remote_code": settings.trust_remote_code}
    model_config = read_config(settings.path, num_labels=1, **source)
    model_config.pad_token_id = pad_token_id
    role = NEW_REWARD_MODEL if settings.new_head else REWARD_MODEL
    model = load_model(role, settings.path, dtype="float32", config=model_config, **source)
    module = RewardModel(model)
    if not module.is_decoder:
        raise ConfigError(
            f"model.path={settings.path} is a {type(model).__name__} without a linear head named `score`; "
            "expected a decoder (GPT-2, Qwen3, Llama, ...)"
        )
    if settings.new_head:
        head = model.get_submodule("score")
        assert isinstance(head, nn.Linear)
        with distributed.whole_parameters(head):
            init_reward_head(head, generator=torch.Generator().manual_seed(config.seed))
    disable_randomness(model)
    model.train()  # transformers loads models in eval mode, which ignores gradient checkpointing
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return module


@torch.no_grad()
def init_reward_head(head: nn.Linear, *, generator: torch.Generator) -> None:
    """Draw the weights from N(0, std = 1/√(d + 1)) and zero the bias, in place, for rewards of order 1.

    A standard deviation of 1/(d + 1), as one paper prints it, makes the first rewards √(d + 1) times smaller. Source:
    lm-human-preferences; "The N Implementation Details of RLHF with PPO" (Hugging Face blog, 2023), "Reward head layer
    initialization".
    """
    # Drawn on the generator's device: under ZeRO-3 the weight is already on the GPU.
    weight = torch.empty(head.weight.shape, device=generator.device)
    head.weight.copy_(weight.normal_(0.0, 1.0 / math.sqrt(head.in_features + 1), generator=generator))
    if head.bias is not None:
        head.bias.zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """Gain and bias that give rewards mean 0 and variance 1: reward = gain · score + bias.

    Fitted to the *raw* scores (gain 1, bias 0: reset first) of responses sampled from the frozen pretrained model:
    before training, so that the first loss sees rewards of order 1, and after it, so that β means the same for every
    reward model. Source: Ziegler et al. 2019, section 2.1; "The N Implementation Details of RLHF with PPO" (Hugging
    Face blog, 2023), "Reward model normalization before and after".
    """

    gain: float = 1.0
    bias: float = 0.0

    def __call__(self, scores: Tensor) -> Tensor:
        return scores * self.gain + self.bias


def fit(scores_B: Tensor) -> Normalization:
    """Compute gain = 1 / σ and bias = −μ / σ from the raw scores of all samples, with the population variance.

    Raises:
        TrainingError: all scores are equal, or one is not finite.
    """
    mean, variance = moments(scores_B)
    if not (variance.isfinite() and variance > 0):
        raise TrainingError(
            f"reward normalization: scores of the samples have mean {float(mean):g} and variance {float(variance):g}; "
            "expected a finite variance above 0. Check the initialization of the head and the sampled responses"
        )
    gain = float(variance.rsqrt())
    return Normalization(gain=gain, bias=-gain * float(mean))


def save(
    directory: Path, normalization: Normalization, tokenizer: PreTrainedTokenizerFast, distributed: Distributed
) -> None:
    """Write weights of the prepared model, tokenizer and normalization; a collective."""
    module = distributed.unwrapped
    assert isinstance(module, RewardModel)
    distributed.save_pretrained(directory, edit=lambda state: fold(state, module, normalization))
    if not distributed.is_main:
        return
    tokenizer.save_pretrained(directory)
    remaining = 0.0 if bias_place(module) is not None else normalization.bias
    record = {**asdict(normalization), "remaining_bias": remaining}
    (directory / NORMALIZATION_FILE).write_text(json.dumps(record, indent=2) + "\n")


def fold(state: dict[str, Tensor], module: RewardModel, normalization: Normalization) -> dict[str, Tensor]:
    """Fold the gain and, if possible, the bias into the state dict of `module.model`, in float64 before rounding."""
    weight = state["score.weight"].double() * normalization.gain
    folded_state = {**state, "score.weight": weight.to(state["score.weight"].dtype)}
    place = bias_place(module)
    if place == "score.bias":
        bias = state[place].double() * normalization.gain + normalization.bias
        folded_state[place] = bias.to(state[place].dtype)
    elif place is not None:
        direction = weight[0] / weight[0].square().sum()
        folded_state[place] = (state[place].double() + normalization.bias * direction).to(state[place].dtype)
    return folded_state


def bias_place(module: RewardModel) -> str | None:
    """Return the name of the parameter that can hold a bias of the score, or None."""
    head = module.model.get_submodule("score")
    if isinstance(head, nn.Linear) and head.bias is not None:
        return "score.bias"
    trunk = module.model.base_model
    norms = [
        name for name, child in trunk.named_children() if isinstance(child, nn.LayerNorm) and child.bias is not None
    ]
    # The last direct child of the trunk: norms of layers are deeper, an embedding norm comes first.
    return f"{module.model.base_model_prefix}.{norms[-1]}.bias" if norms else None
