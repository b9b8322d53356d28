"""The reward head before training."""

from __future__ import annotations

import math

import torch
from torch import nn


def init_reward_head(head: nn.Linear, *, generator: torch.Generator | None = None) -> None:
    """Weights from N(0, std = 1/√(d + 1)) and bias 0, in place: rewards of order 1 for hidden states of order 1.

    The root matters: a standard deviation of 1/(d + 1), as one paper prints it, makes first rewards √(d + 1) times
    smaller. Source: lm-human-preferences; seed 003, "Reward head layer initialization".
    """
    # Drawn on the generator's device: under ZeRO-3 the weight is on the GPU already, and a generator belongs to one.
    device = "cpu" if generator is None else generator.device
    weight = torch.empty(head.weight.shape, device=device)
    with torch.no_grad():
        head.weight.copy_(weight.normal_(0.0, reward_head_std(head.in_features), generator=generator))
        if head.bias is not None:
            head.bias.zero_()


def reward_head_std(hidden_size: int) -> float:
    return 1.0 / math.sqrt(hidden_size + 1)
