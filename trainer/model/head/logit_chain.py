"""Arithmetic of one tile of logits in torch's operations, for CPUs and float64: the definition of logit_kernels.py.

Exponentials are taken by a softmax over the tile's rows, which a CPU computes three times faster than `exp`.

Shape legend: _C tokens of a chunk, _K vocabulary entries of a tile, _E candidates of a token.
"""

from __future__ import annotations

import torch

from lockstep.trainer.model.head.logit_tiles import Gradients, LogitTiles, Sums


def statistics(
    tiles: LogitTiles, tile: slice, z_CK: torch.Tensor, sums: Sums, with_entropy: bool, out: torch.Tensor | None = None
) -> None:
    """Add a tile of products, which are overwritten, to the sums of its tokens. out: memory for the tile's softmax."""
    transform(tiles, tile, z_CK)
    columns, inside = place(sums.target_ids_N[:, None], tile)
    sums.target_logit_N.copy_(torch.where(inside, z_CK.gather(1, columns), sums.target_logit_N[:, None])[:, 0])
    ids_CE, logit_CE = sums.candidate_ids_NE, sums.candidate_logit_NE
    if ids_CE is not None and logit_CE is not None:
        columns, inside = place(ids_CE, tile)
        logit_CE.copy_(torch.where(inside, z_CK.gather(1, columns), logit_CE))
    p_CK, largest_C, exp_sum_C = _softmax(tiles, z_CK, out)
    new_m_C = torch.maximum(sums.m_N, largest_C)
    shift_C = sums.m_N - new_m_C
    decay_C, own_C = shift_C.exp(), (largest_C - new_m_C).exp() * exp_sum_C
    if with_entropy:
        own_t_C = own_C * z_CK.sub_(new_m_C[:, None]).mul_(p_CK).sum(1)
        sums.t_N.add_(shift_C * sums.s_N).mul_(decay_C).add_(own_t_C)
    sums.s_N.mul_(decay_C).add_(own_C)
    sums.m_N.copy_(new_m_C)
    if ids_CE is not None:
        sums.r_N.mul_(decay_C).add_(own_C * _cleared(p_CK, columns, inside).sum(1))


def gradient(tiles: LogitTiles, tile: slice, z_CK: torch.Tensor, rows: Gradients) -> torch.Tensor:
    """Return the gradient of a tile of products, in scratch memory. z_CK: the products, which are overwritten."""
    slope_CK = transform(tiles, tile, z_CK, with_slope=True)
    p_CK, largest_C, exp_sum_C = _softmax(tiles, z_CK)
    of_tile_C = (largest_C - rows.lse_N).exp() * exp_sum_C  # the tile's part of the probability
    if rows.grad_entropy_N is None:
        dz_CK = p_CK.mul_((-of_tile_C * rows.common_N)[:, None])
    else:
        constant_C = rows.common_N + rows.grad_entropy_N * (rows.entropy_N - rows.lse_N)
        dz_CK = _times(p_CK, z_CK, of_tile_C * constant_C, of_tile_C * rows.grad_entropy_N)
    return _finish(tiles, tile, dz_CK, slope_CK, rows)


def gradient_of_softmax(tiles: LogitTiles, tile: slice, p_CK: torch.Tensor, rows: Gradients) -> torch.Tensor:
    """Return what `gradient` does, from a softmax over the whole vocabulary instead of products."""
    dz_CK = tiles.scratch(0, p_CK.shape)
    if rows.grad_entropy_N is None:
        torch.mul(p_CK, -rows.common_N[:, None], out=dz_CK)
    else:
        log_p_CK = torch.clamp_min(p_CK, torch.finfo(p_CK.dtype).tiny, out=dz_CK).log_()
        _times(p_CK, log_p_CK, rows.common_N + rows.grad_entropy_N * rows.entropy_N, rows.grad_entropy_N)
    return _finish(tiles, tile, dz_CK, None, rows)


def _times(p_CK: torch.Tensor, x_CK: torch.Tensor, constant_C: torch.Tensor, factor_C: torch.Tensor) -> torch.Tensor:
    """Return -p (constant + factor x) in the place of x."""
    return torch.addcmul(-constant_C[:, None], x_CK, -factor_C[:, None], out=x_CK).mul_(p_CK)


def _finish(
    tiles: LogitTiles, tile: slice, dz_CK: torch.Tensor, slope_CK: torch.Tensor | None, rows: Gradients
) -> torch.Tensor:
    """Set the gradients of candidates, add those of targets, and go back through the softcap, in place."""
    if rows.candidate_ids_NE is not None and rows.candidate_dz_NE is not None:
        columns, inside = place(rows.candidate_ids_NE, tile)
        _cleared(dz_CK, columns, inside).scatter_add_(1, columns, torch.where(inside, rows.candidate_dz_NE, 0))
    columns, inside = place(rows.target_ids_N[:, None], tile)
    dz_CK.scatter_add_(1, columns, torch.where(inside, rows.grad_logprob_N[:, None], 0))
    factor = tiles.inner * tiles.transform.outer
    if slope_CK is not None:
        dz_CK.mul_(slope_CK)
    return dz_CK if factor == 1 else dz_CK.mul_(factor)


def transform(tiles: LogitTiles, tile: slice, z_CK: torch.Tensor, *, with_slope: bool = False) -> torch.Tensor | None:
    """Turn products into the logits that were sampled from, in place; return the softcap's slope, if any."""
    if (bias_K := tiles.bias(tile)) is not None:
        z_CK.add_(bias_K)
    if tiles.inner != 1:
        z_CK.mul_(tiles.inner)
    if tiles.transform.softcap is None:
        return None
    z_CK.tanh_()
    slope_CK = torch.mul(z_CK, z_CK, out=tiles.scratch(2, z_CK.shape)).neg_().add_(1) if with_slope else None
    z_CK.mul_(tiles.transform.outer)
    return slope_CK


def _softmax(
    tiles: LogitTiles, z_CK: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the softmax over the tile, in `out` or buffer 1, and per token its largest logit m and Σ exp(z - m)."""
    p_CK = torch.softmax(z_CK, 1, out=tiles.scratch(1, z_CK.shape) if out is None else out)
    return p_CK, z_CK.amax(1), p_CK.amax(1).reciprocal()


def place(ids: torch.Tensor, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each vocabulary entry in the tile, or the nearest one, and whether it is inside."""
    columns = ids - tile.start
    return columns.clamp(0, tile.stop - tile.start - 1), (columns >= 0) & (columns < tile.stop - tile.start)


def _cleared(x_CK: torch.Tensor, columns: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Set these columns to 0, in place. Several entries outside share a column, so they multiply it by 1."""
    return x_CK.scatter_reduce_(1, columns, torch.where(inside, 0, 1).to(x_CK.dtype), "prod")
