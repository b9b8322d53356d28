"""Log-probability and entropy over a restricted sampling support: logits of its few tokens instead of all.

Truncated sampling returns at most some 20 tokens of the vocabulary per sampled one. Their rows of the weight are
gathered, so only the weight's gradient takes a matrix product with the vocabulary.

Shape legend: _N target tokens, _D hidden size, _V vocabulary, _C tokens of a chunk, _K vocabulary entries of a tile,
_E tokens of the largest support.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.trainer.model.head.logit_chain import place
from lockstep.trainer.model.head.logit_tiles import EXCLUDED, GradientSums, LogitTiles, LogitTransform
from lockstep.trainer.model.layers.autocast import operand_dtype


class SupportLogprobs(torch.autograd.Function):
    """Autograd of `fused_logprobs` with a support; gradients as in fused_head.py."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_ids_N: torch.Tensor,
        transform: LogitTransform,
        offsets: torch.Tensor,
        ids: torch.Tensor,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded_to = operand_dtype(hidden_ND, weight_VD)
        tiles = LogitTiles(hidden_ND, weight_VD, bias_V, transform, rounded_to)
        ids_NE, is_real_NE = _padded(offsets, ids)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            logits_NE = _logits(tiles, ids_NE).masked_fill_(~is_real_NE, EXCLUDED)
        logp_NE = logits_NE.log_softmax(1)
        is_target_NE = (ids_NE == target_ids_N[:, None]) & is_real_NE
        logprob_N = torch.where(is_target_NE.any(1), (logp_NE * is_target_NE).sum(1), -torch.inf)
        entropy_N = -(logp_NE.exp() * logp_NE * is_real_NE).sum(1) if with_entropy else torch.zeros_like(logprob_N)
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, ids_NE, is_real_NE, is_target_NE, logits_NE, logp_NE, entropy_N
        )
        ctx.transform, ctx.rounded_to, ctx.with_entropy = transform, rounded_to, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return *_gradients(ctx, *grads), None, None, None, None, None


def _padded(offsets: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the supports as a table (N, E), and where it is not padding. Waits for the device, for E."""
    sizes_N = offsets.diff()
    width = int(sizes_N.max()) if len(sizes_N) and len(ids) else 0
    places = torch.arange(width, device=ids.device)
    index_NE = (offsets[:-1, None] + places).clamp_max(len(ids) - 1)
    return ids[index_NE], places < sizes_N[:, None]


def _gathered(tiles: LogitTiles, ids_NE: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield chunks of tokens, and the (C, E, D) rows of the weight of their supports, as operands."""
    (num_tokens, width), hidden = ids_NE.shape, tiles.hidden_ND.shape[1]
    chunk = max(1, tiles.budget // (2 * tiles.dtype.itemsize * max(width, 1) * hidden))
    for start in range(0, num_tokens, chunk):
        tokens = slice(start, min(start + chunk, num_tokens))
        yield tokens, tiles.operand(tiles.weight_VD[ids_NE[tokens]])


def _product(tiles: LogitTiles, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the products of two batches of operands, with sums in the wide dtype."""
    return torch.bmm(a, b) if tiles.operand_dtype == tiles.dtype else torch.bmm(a, b, out_dtype=tiles.dtype)


def _logits(tiles: LogitTiles, ids_NE: torch.Tensor) -> torch.Tensor:
    """Return the (N, E) logits that were sampled from."""
    parts = [
        _product(tiles, rows_CED, tiles.hidden_ND[tokens, :, None])[..., 0]
        for tokens, rows_CED in _gathered(tiles, ids_NE)
    ]
    z_NE = torch.cat(parts) if parts else ids_NE.to(tiles.dtype)
    z_NE = z_NE * tiles.in_product
    if tiles.bias_V is not None:
        z_NE = z_NE + tiles.bias_V[ids_NE]
    z_NE = z_NE * tiles.inner
    return z_NE if tiles.transform.softcap is None else z_NE.tanh() * tiles.transform.outer


def _gradients(
    ctx: Any, grad_logprob_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute gradients of hidden states, weight and bias, each None if not needed."""
    hidden_ND, weight_VD, bias_V, ids_NE, is_real_NE, is_target_NE, logits_NE, logp_NE, entropy_N = ctx.saved_tensors
    transform: LogitTransform = ctx.transform
    needs_hidden, *needs = ctx.needs_input_grad[:3]
    tiles = LogitTiles(hidden_ND, weight_VD, bias_V, transform, ctx.rounded_to)
    dz_NE = torch.zeros_like(logp_NE)
    if grad_logprob_N is not None:
        dz_NE = grad_logprob_N[:, None] * (is_target_NE.to(tiles.dtype) - logp_NE.exp())
    if grad_entropy_N is not None and ctx.with_entropy:
        dz_NE = dz_NE - grad_entropy_N[:, None] * logp_NE.exp() * (logp_NE + entropy_N[:, None])
    if transform.softcap is not None:
        dz_NE = dz_NE * (1 - (logits_NE / transform.outer) ** 2)
    dz_NE = dz_NE.masked_fill_(~is_real_NE, 0) * (transform.outer * tiles.inner)
    grad_hidden_ND = torch.zeros_like(tiles.hidden_ND, dtype=tiles.dtype) if needs_hidden else None
    if grad_hidden_ND is not None:
        for tokens, rows_CED in _gathered(tiles, ids_NE):
            of_chunk = _product(tiles, tiles.operand(dz_NE[tokens, None]), rows_CED)[:, 0]
            grad_hidden_ND[tokens] = of_chunk.mul_(tiles.in_product)
    sums = GradientSums(tiles, False, *needs)
    for tile in tiles.tiles if any(needs) else ():
        weight_KD = tiles.weight(tile)
        for tokens in tiles.chunks:
            dz_CK = tiles.scratch(1, torch.Size((tokens.stop - tokens.start, len(weight_KD))), tiles.operand_dtype)
            columns, inside = place(ids_NE[tokens], tile)
            dz_CK.zero_().scatter_add_(1, columns, torch.where(inside, dz_NE[tokens], 0).to(dz_CK.dtype))
            sums.add(dz_CK, weight_KD, tile, tokens)
    return grad_hidden_ND, sums.weight_VD, sums.bias_V
