"""Logits of the whole vocabulary by the trainer's head: the tiles of `fused_head.py`, kept instead of summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lockstep.trainer.model.head import logit_chain
from lockstep.trainer.model.head.fused_head import FusedHead
from lockstep.trainer.model.head.logit_tiles import IDENTITY, LogitTiles
from lockstep.trainer.model.layers.autocast import operand_dtype

if TYPE_CHECKING:
    from lockstep.trainer.model.policy import Policy


@contextmanager
def whole_logits(policy: Policy) -> Iterator[list[torch.Tensor]]:
    """Collect the (T, V) logits of the trained tokens of every pass of the policy inside the block, on the host.

    With scale, softcap, bias, autocast and temperature of the pass, and before a sampling support. A pre-hook computes
    them, which DeepSpeed ZeRO-3 runs after it has gathered the head's parameters.
    """
    head = policy.causal_lm.get_output_embeddings()
    assert isinstance(head, FusedHead)
    heard: list[torch.Tensor] = []

    def hear(_: object, args: tuple[torch.Tensor, ...], settings: dict[str, Any]) -> None:
        hidden_ND = args[0].detach()
        rounded_to = operand_dtype(hidden_ND, head.weight)
        transform = settings.get("transform", IDENTITY)
        tiles = LogitTiles(hidden_ND, head.weight, head.bias, transform, rounded_to)
        logits_NV = hidden_ND.new_empty(len(hidden_ND), len(head.weight), dtype=tiles.dtype)
        with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
            for tile in tiles.tiles:
                weight_KD = tiles.weight(tile)
                for tokens in tiles.chunks:
                    z_CK = tiles.products(weight_KD, tokens)
                    logit_chain.transform(tiles, tile, z_CK)
                    logits_NV[tokens, tile] = z_CK
        heard.append(logits_NV.cpu())

    handle = head.register_forward_pre_hook(hear, with_kwargs=True)
    try:
        yield heard
    finally:
        handle.remove()


def whole_scores(
    policy: Policy, score: Callable[[Sequence[int], float], object], ids: Sequence[int], error: float
) -> torch.Tensor:
    """Return the (N, V) logits behind each of the ids but the last. score: runs the policy (ids, error)."""
    with whole_logits(policy) as heard:
        score(ids, error)
    return heard[-1]
