"""The optimizer over a policy's parameters."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import OptimizerConfig


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only: norms, biases and other vectors are never decayed."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    # ZeRO-3 leaves parameters with no elements of their own; their true number of dimensions is in ds_shape.
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for _, parameter in trained:
        shape = parameter.ds_shape if "ds_shape" in vars(parameter) else parameter.shape
        groups[len(shape) >= 2].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": config.weight_decay if is_matrix else 0.0}
            for is_matrix, parameters in groups.items()
            if parameters
        ],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
