"""Arithmetic of one tile of logits in two Triton kernels, which read its float32 products once.

`_statistics` writes only numbers per token. `_gradient` writes the products' gradient once, in the dtype of the
operands of the next products: in half precision beside the products, in float32 in their place. As logit_chain.py,
which is their definition.

Shape legend: _C tokens of a chunk, _K vocabulary entries of a tile, _E candidates of a token.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Triton's types describe a kernel only from outside: its constants are no Python values, and calls inside never return.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lockstep.trainer.model.head.logit_tiles import EXCLUDED, Gradients, LogitTiles, Sums

BLOCK = 2048
"""Vocabulary entries that a program holds at a time: eight per thread."""
WARPS = 8
NONE = tl.constexpr(EXCLUDED)


def statistics(tiles: LogitTiles, tile: slice, z_CK: torch.Tensor, sums: Sums, *, with_entropy: bool) -> None:
    """Add a tile of products to the sums of its tokens."""
    ids_CE = sums.candidate_ids_NE
    num_candidates = 0 if ids_CE is None else ids_CE.shape[1]
    numbers = (sums.m_N, sums.s_N, sums.t_N, sums.r_N, sums.target_logit_N, sums.candidate_logit_NE)
    _statistics[(len(z_CK),)](
        z_CK,
        tiles.bias(tile),
        (sums.target_ids_N, ids_CE),
        numbers,
        _window(tiles, tile),
        WITH_ENTROPY=with_entropy,
        HAS_SOFTCAP=tiles.transform.softcap is not None,
        NUM_CANDIDATES=num_candidates,
        CANDIDATE_BLOCK=triton.next_power_of_2(max(num_candidates, 1)),
        BLOCK=_block(tiles),
        num_warps=WARPS,
    )


def gradient(tiles: LogitTiles, tile: slice, z_CK: torch.Tensor, rows: Gradients) -> torch.Tensor:
    """Return the gradient of a tile of products as an operand, in scratch memory."""
    in_place = tiles.operand_dtype == tiles.dtype
    dz_CK = z_CK if in_place else tiles.scratch(1, z_CK.shape, tiles.operand_dtype)
    of_candidates = rows.candidate_dz_NE
    numbers = (rows.lse_N, rows.entropy_N, rows.common_N, rows.grad_logprob_N, rows.grad_entropy_N, of_candidates)
    block = _block(tiles)
    _gradient[(len(z_CK), triton.cdiv(z_CK.shape[1], block))](
        z_CK,
        dz_CK,
        tiles.bias(tile),
        (rows.target_ids_N, rows.candidate_ids_NE),
        numbers,
        _window(tiles, tile),
        WITH_ENTROPY=rows.grad_entropy_N is not None,
        HAS_SOFTCAP=tiles.transform.softcap is not None,
        NUM_CANDIDATES=0 if of_candidates is None else of_candidates.shape[1],
        BLOCK=block,
        num_warps=WARPS,
    )
    return dz_CK


def _window(tiles: LogitTiles, tile: slice) -> tuple[int, int, float, float]:
    return tile.start, tile.stop - tile.start, tiles.inner, tiles.transform.outer


def _block(tiles: LogitTiles) -> int:
    return min(BLOCK, int(triton.next_power_of_2(tiles.width)))


@triton.jit
def _tanh(x):
    """Near 0 by its series: there the quotient would lose all digits."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    x2 = x * x
    small = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 + x2 * (-17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, small, tl.where(x < 0.0, -large, large))


@triton.jit
def _logits(z_ptr, bias_ptr, columns, inside, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """Load products of a row; return the logits that were sampled from, and the derivative by the products / inner."""
    z = tl.load(z_ptr + columns, mask=inside, other=0.0)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    z *= inner
    slope = outer
    if HAS_SOFTCAP:
        z = _tanh(z)
        slope = (1.0 - z * z) * outer
        z *= outer
    return z, slope


@triton.jit
def _statistics(
    z_ptr, bias_ptr, ids, numbers, window,
    WITH_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NUM_CANDIDATES: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    target_ptr, candidate_ptr = ids
    m_ptr, s_ptr, t_ptr, r_ptr, target_logit_ptr, candidate_logit_ptr = numbers
    start, num_columns, inner, outer = window
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * num_columns
    m, s, t, r = tl.load(m_ptr + row), tl.load(s_ptr + row), tl.load(t_ptr + row), tl.load(r_ptr + row)
    for first in range(0, num_columns, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < num_columns
        z, _ = _logits(z_ptr, bias_ptr, columns, inside, inner, outer, HAS_SOFTCAP)
        z = tl.where(inside, z, NONE)
        new_m = tl.maximum(m, tl.max(z, 0))
        decay = tl.exp(m - new_m)
        e = tl.where(inside, tl.exp(z - new_m), 0.0)
        if WITH_ENTROPY:
            t = decay * (t + (m - new_m) * s) + tl.sum(e * (z - new_m), 0)
        s = decay * s + tl.sum(e, 0)
        if NUM_CANDIDATES > 0:
            for i in range(NUM_CANDIDATES):
                column = tl.load(candidate_ptr + row * NUM_CANDIDATES + i) - start
                if (column >= first) & (column < first + BLOCK):
                    e = tl.where(columns == column, 0.0, e)
            r = decay * r + tl.sum(e, 0)
        m = new_m
    tl.store(m_ptr + row, m)
    tl.store(s_ptr + row, s)
    if WITH_ENTROPY:
        tl.store(t_ptr + row, t)
    column = tl.load(target_ptr + row) - start
    inside = (column >= 0) & (column < num_columns)
    z, _ = _logits(z_ptr, bias_ptr, column, inside, inner, outer, HAS_SOFTCAP)
    tl.store(target_logit_ptr + row, z, mask=inside)
    if NUM_CANDIDATES > 0:
        tl.store(r_ptr + row, r)
        places = tl.arange(0, CANDIDATE_BLOCK)
        is_real = places < NUM_CANDIDATES
        places += row * NUM_CANDIDATES
        columns = tl.load(candidate_ptr + places, mask=is_real, other=-1) - start
        inside = is_real & (columns >= 0) & (columns < num_columns)
        z, _ = _logits(z_ptr, bias_ptr, columns, inside, inner, outer, HAS_SOFTCAP)
        tl.store(candidate_logit_ptr + places, z, mask=inside)


@triton.jit
def _gradient(
    z_ptr, dz_ptr, bias_ptr, ids, numbers, window,
    WITH_ENTROPY: tl.constexpr, HAS_SOFTCAP: tl.constexpr, NUM_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a row per program."""
    target_ptr, candidate_ptr = ids
    lse_ptr, entropy_ptr, common_ptr, grad_logprob_ptr, grad_entropy_ptr, candidate_dz_ptr = numbers
    start, num_columns, inner, outer = window
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < num_columns
    z, slope = _logits(z_ptr + row * num_columns, bias_ptr, columns, inside, inner, outer, HAS_SOFTCAP)
    log_p = z - tl.load(lse_ptr + row)
    upstream = tl.load(common_ptr + row)
    if WITH_ENTROPY:
        upstream += tl.load(grad_entropy_ptr + row) * (log_p + tl.load(entropy_ptr + row))
    dz = -tl.exp(log_p) * upstream
    if NUM_CANDIDATES > 0:
        for i in range(NUM_CANDIDATES):
            place = row * NUM_CANDIDATES + i
            column = tl.load(candidate_ptr + place) - start
            if (column >= first) & (column < first + BLOCK):
                dz = tl.where(columns == column, tl.load(candidate_dz_ptr + place), dz)
    target = tl.load(target_ptr + row) - start
    dz += tl.where(columns == target, tl.load(grad_logprob_ptr + row), 0.0)
    dz *= slope * inner
    tl.store(dz_ptr + row * num_columns + columns, dz.to(dz_ptr.dtype.element_ty), mask=inside)
