"""Supervised training of the small demo models from random weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

IGNORED = -100
"""Label of a token that is not learned."""


def sample_from_everything(model: PreTrainedModel) -> None:
    """Set untruncated sampling at temperature 1, so that no engine or pipeline fills in a default that truncates."""
    generation = model.generation_config
    assert generation is not None
    generation.do_sample, generation.temperature, generation.top_p, generation.top_k = True, 1.0, 1.0, 0


def make_adam(model: PreTrainedModel) -> torch.optim.Optimizer:
    """Make AdamW without weight decay; `descend` sets the learning rate."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)


def descend(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: Tensor, *, lr: float, max_grad_norm: float = 1.0
) -> None:
    """Make one optimizer step on the loss, with clipped gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()


def next_token_loss(
    model: PreTrainedModel, ids_BT: Tensor, labels_BT: Tensor | None = None, **inputs: Tensor
) -> Tensor:
    """Return the mean cross-entropy of next-token prediction.

    Args:
        ids_BT: padded on the right if at all: with causal attention, tokens do not see padding behind them.
        labels_BT: the ids, or `IGNORED`; None: all ids are learned.
        inputs: further ones of the model, such as images.
    """
    logits_BTV = model(input_ids=ids_BT, use_cache=False, **inputs).logits
    labels_BT = ids_BT if labels_BT is None else labels_BT
    return cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED)
