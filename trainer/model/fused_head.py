"""LM head fused with log-probability and entropy: logits exist for one tile at a time.

With a vocabulary of 151,936 the logits of 8,192 tokens take 4.6 GiB in float32, and softmax and its gradient triple
that. Here the vocabulary is processed in tiles (each tile of the weight is read, and its gradient written, once) and
the tokens in chunks. A running log-sum-exp joins the tiles; backward recomputes each tile. Kept between forward and
backward are the hidden states, the weight and three numbers per token. If all logits fit one tile and one chunk, their
exponentials are in memory anyway when forward ends; they are kept, and backward recomputes nothing.

On request the same passes give the log-probabilities of a table of further vocabulary entries per token, its
candidates, and the log-probability of all others together (`fused_candidates`). A divergence from a teacher that names
its most probable tokens is a function of these (trainer/objective/distillation/divergence.py).

Covered: bias, logit scale, final softcap, temperature, restricted sampling support; inputs from float64 to bfloat16 and
autocast, which rounds the operands of products; products accumulated and softmax taken in float32 or wider. Not
covered: heads that are not one linear layer, second derivatives.

Shape legend: _N target tokens, _D hidden size, _V vocabulary, _C tokens of a chunk, _K vocabulary entries of a tile,
_E candidates of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.trainer.model.layers.autocast import operand_dtype
from lockstep.trainer.model.logit_tiles import EXCLUDED, IDENTITY, LogitTiles, LogitTransform, VocabEntries

REST_FLOOR = math.log(1e-30)
"""Least log-probability of all entries but the candidates: float32 holds neither smaller ones nor their inverses."""


def fused_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_ids_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    support: tuple[torch.Tensor, torch.Tensor] | None = None,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log π(target) and the entropy of π per token, differentiable in hidden states, weight and bias.

    Args:
        hidden_ND: hidden states at the positions that predict the targets.
        target_ids_N: int64, in [0, V).
        transform: from the head's output to the logits that were sampled from.
        support: offsets (N + 1,) and token ids, int64; token n was drawn from `ids[offsets[n]:offsets[n + 1]]` and π
            is normalized over these alone. A target outside its support has log-probability -inf.
        with_entropy: False returns zeros, at no cost.

    Returns:
        logprob_N and entropy_N in nats; float32, or float64 if an input is.
    """
    _check_shapes(hidden_ND, weight_VD)
    if support is not None and len(support[0]) != len(target_ids_N) + 1:
        raise ValueError(f"found support for {len(support[0]) - 1} tokens, expected {len(target_ids_N)} as targets")
    logprob_N, entropy_N, _ = _FusedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, target_ids_N, transform, VocabEntries.of(support), with_entropy, None
    )
    return logprob_N, entropy_N


def fused_candidates(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_ids_N: torch.Tensor,
    candidate_ids_NE: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `fused_logprobs` does, and the log-probabilities of candidates, differentiable alike.

    candidate_ids_NE: int64, distinct for each token, in [0, V).

    The third tensor is (N, E + 1): log π of each candidate, and last log(1 - Σ π) of all other vocabulary entries,
    at least `REST_FLOOR`. It is summed over these entries, not subtracted from 1, so it is exact where it is small.
    """
    _check_shapes(hidden_ND, weight_VD)
    if candidate_ids_NE.ndim != 2 or len(candidate_ids_NE) != len(target_ids_N):
        raise ValueError(
            f"found candidates of shape {tuple(candidate_ids_NE.shape)}, expected ({len(target_ids_N)}, entries)"
        )
    return _FusedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, target_ids_N, transform, None, with_entropy, candidate_ids_NE
    )


def _check_shapes(hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> None:
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden states (tokens, D) and weight (V, D) do not match: found {tuple(hidden_ND.shape)} and "
            f"{tuple(weight_VD.shape)}. A weight of shape (0,) is a ZeRO-3 partition outside its module's forward"
        )


class FusedHead(nn.Linear):
    """The model's own head, which returns log-probabilities if it is given targets.

    It replaces `lm_head` and shares its parameters, so state dicts, tying and checkpoints do not change. The fused
    computation runs inside this module's forward because DeepSpeed ZeRO-3 gathers partitioned parameters there, once
    before forward and once before backward, including those tied to the embedding.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: must stay callable as the plain head
        self,
        input: torch.Tensor,
        target_ids_N: torch.Tensor | None = None,
        *,
        candidate_ids_NE: torch.Tensor | None = None,
        **settings: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return plain logits without targets; else what `fused_logprobs` or, with candidates, `fused_candidates` does
        with these settings."""
        if target_ids_N is None:
            return F.linear(input, self.weight, self.bias)
        if candidate_ids_NE is None:
            return fused_logprobs(input, self.weight, target_ids_N, bias_V=self.bias, **settings)
        return fused_candidates(input, self.weight, target_ids_N, candidate_ids_NE, bias_V=self.bias, **settings)


class _FusedLogprobs(torch.autograd.Function):
    """Autograd of `fused_candidates`. Per token, with logits z, p = softmax(z), entropy H, target y, candidates E, and
    r = Σ p_j over all j outside of E:

    ∂ logp / ∂z_j = [j = y] - p_j        ∂H / ∂z_j = -p_j (log p_j + H)        ∂ log r / ∂z_j = [j ∉ E] p_j / r - p_j
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_ids_N: torch.Tensor,
        transform: LogitTransform,
        support: VocabEntries | None,
        with_entropy: bool,
        candidate_ids_NE: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rounded_to = operand_dtype(hidden_ND, weight_VD)
        tiles = LogitTiles(hidden_ND, weight_VD, bias_V, transform, support, rounded_to)
        candidates = None if candidate_ids_NE is None else VocabEntries.of_table(candidate_ids_NE).sorted_by(tiles)
        num_candidates = 0 if candidate_ids_NE is None else candidate_ids_NE.shape[1]
        with torch.autocast(hidden_ND.device.type, enabled=False):
            stats = _normalize(tiles, target_ids_N, with_entropy, candidates, num_candidates)
        logp_NF = torch.cat([stats.candidate_logit_NE - stats.lse_N[:, None], stats.log_rest_N[:, None]], 1)
        ctx.save_for_backward(
            hidden_ND,
            weight_VD,
            bias_V,
            target_ids_N,
            stats.lse_N,
            stats.entropy_N,
            stats.exp_NV,
            stats.sum_N,
            logp_NF,
        )
        ctx.transform, ctx.rounded_to = transform, rounded_to
        ctx.support, ctx.with_entropy = tiles.support, with_entropy
        ctx.candidates = candidates
        if not with_entropy:
            ctx.mark_non_differentiable(stats.entropy_N)
        if candidates is None:
            ctx.mark_non_differentiable(logp_NF)
        # An entropy that is only reported then has a None gradient, not zeros, and backward skips its part.
        ctx.set_materialize_grads(False)
        return stats.target_logit_N - stats.lse_N, stats.entropy_N, logp_NF

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return *_gradients(ctx, *grads), None, None, None, None, None


def _targets_in(tile: slice, target_ids_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two (C, 1) tensors: True if the target lies in the tile, and its column there (0 if not)."""
    column = target_ids_C - tile.start
    inside = (column >= 0) & (column < tile.stop - tile.start)
    return inside[:, None], torch.where(inside, column, 0)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Normalized:
    """Numbers per token of one pass over the logits."""

    lse_N: torch.Tensor
    target_logit_N: torch.Tensor
    entropy_N: torch.Tensor
    candidate_logit_NE: torch.Tensor
    log_rest_N: torch.Tensor
    """log r; 0 without candidates."""
    exp_NV: torch.Tensor | None
    """exp(z - m), if all logits are one tile and one chunk."""
    sum_N: torch.Tensor
    """(N, 1) Σ exp(z - m)."""


def _normalize(
    tiles: LogitTiles,
    target_ids_N: torch.Tensor,
    with_entropy: bool,
    candidates: VocabEntries | None,
    num_candidates: int,
) -> _Normalized:
    """Compute log-sum-exp, target logit, entropy and candidates per token, in one pass (online softmax).

    Running over tiles: m = largest logit so far, s = Σ exp(z - m), t = Σ exp(z - m) (z - m), and r as s without the
    candidates. A new maximum m' rescales them by a = exp(m - m'): s' = a s, r' = a r, t' = a (t + (m - m') s).
    """
    shape = (len(target_ids_N), 1)
    wide = {"dtype": tiles.dtype, "device": target_ids_N.device}
    m, s, t = torch.full(shape, EXCLUDED, **wide), torch.zeros(shape, **wide), torch.zeros(shape, **wide)
    r, candidate_logit = torch.zeros(shape, **wide), torch.zeros((len(target_ids_N), num_candidates), **wide)
    e_CK = None
    target_logit = torch.full(shape, EXCLUDED, **wide)
    for tile in tiles.tiles:
        weight_KD = tiles.weight(tile)
        for tokens in tiles.chunks:
            z_CK = tiles.finish(tiles.logits(weight_KD, tile, tokens), tile, tokens)
            inside, column = _targets_in(tile, target_ids_N[tokens])
            target_logit[tokens] = torch.where(inside, z_CK.gather(1, column), target_logit[tokens])
            of_tile = None
            if candidates is not None:
                of_tile, places = candidates.within(tiles, tokens, tile)
                candidate_logit.view(-1)[places] = z_CK[of_tile]
            new_m = torch.maximum(m[tokens], z_CK.amax(1, keepdim=True))
            shift = m[tokens] - new_m
            decay = shift.exp()
            z_CK.sub_(new_m)
            e_CK = torch.exp(z_CK, out=tiles.scratch(1, z_CK.shape)) if with_entropy else z_CK.exp_()
            if with_entropy:
                t[tokens] = decay * (t[tokens] + shift * s[tokens]) + torch.linalg.vecdot(e_CK, z_CK)[:, None]
            s[tokens] = decay * s[tokens] + e_CK.sum(1, keepdim=True)
            if of_tile is not None:
                own = e_CK[of_tile]
                e_CK[of_tile] = 0
                r[tokens] = decay * r[tokens] + e_CK.sum(1, keepdim=True)
                e_CK[of_tile] = own
            m[tokens] = new_m
    if tiles.support is not None:
        target_logit = torch.where(target_logit == EXCLUDED, -torch.inf, target_logit)
    log_s = s.log()
    entropy = log_s - t / s if with_entropy else torch.zeros_like(s)
    log_rest = r if candidates is None else (r.log() - log_s).clamp_min(REST_FLOOR)
    is_whole = len(tiles.tiles) == len(tiles.chunks) == 1 and tiles.transform.softcap is None
    return _Normalized(
        lse_N=(m + log_s)[:, 0],
        target_logit_N=target_logit[:, 0],
        entropy_N=entropy[:, 0],
        candidate_logit_NE=candidate_logit,
        log_rest_N=log_rest[:, 0],
        exp_NV=e_CK if is_whole else None,
        sum_N=s,
    )


def _gradients(
    ctx: Any,
    grad_logprob_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    grad_logp_NF: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute gradients of hidden states, weight and bias, each None if not needed.

    Recomputes the logits unless `_normalize` has kept their exponentials. Sums are in the wide dtype: over tiles for
    hidden states, over chunks for a tile of the weight, which is rounded to the weight's dtype once.

    The logits outside of the candidates get -p (g - g_rest / r), where g is the sum over all outputs that are divided
    by the same sum of exponentials. Those of the candidates are set apart: there g_rest / r does not enter, and
    subtracting it again would cancel nothing but digits where r is small.
    """
    hidden_ND, weight_VD, bias_V, target_ids_N, lse_N, entropy_N, exp_NV, sum_N, logp_NF = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    transform: LogitTransform = ctx.transform
    tiles = LogitTiles(hidden_ND, weight_VD, bias_V, transform, ctx.support, ctx.rounded_to)
    hidden_ND = tiles.hidden_ND
    grad_logprob_N = torch.zeros_like(lse_N) if grad_logprob_N is None else grad_logprob_N
    grad_entropy_N = grad_entropy_N if ctx.with_entropy else None
    candidates: VocabEntries | None = ctx.candidates if grad_logp_NF is not None else None
    common_N1, candidate_dz_NE = grad_logprob_N[:, None].to(tiles.dtype), logp_NF[:, :-1]
    if candidates is not None and grad_logp_NF is not None:
        grad_logp_NF = grad_logp_NF.to(tiles.dtype)
        all_N1 = common_N1 + grad_logp_NF.sum(1, keepdim=True)
        common_N1 = all_N1 - grad_logp_NF[:, -1:] * (-logp_NF[:, -1:]).exp()
        entropy_dz = 0.0 if grad_entropy_N is None else grad_entropy_N[:, None] * (logp_NF + entropy_N[:, None])
        candidate_dz_NE = (grad_logp_NF - logp_NF.exp() * (all_N1 + entropy_dz))[:, :-1]
    grad_hidden = torch.zeros(hidden_ND.shape, dtype=tiles.dtype, device=hidden_ND.device) if needs_hidden else None
    grad_weight = torch.empty_like(weight_VD) if needs_weight else None
    grad_bias = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
    tile_KD = torch.empty(tiles.width, weight_VD.shape[1], dtype=tiles.dtype, device=weight_VD.device)
    for tile in tiles.tiles:
        weight_KD = tiles.weight(tile)
        grad_KD = tile_KD[: len(weight_KD)].zero_()
        grad_K = torch.zeros(len(weight_KD), dtype=tiles.dtype, device=weight_VD.device)
        for tokens in tiles.chunks:
            g_common = common_N1[tokens]
            slope_CK = None
            if exp_NV is not None and grad_entropy_N is None:
                dz_CK = torch.mul(exp_NV, -g_common / sum_N, out=tiles.scratch(0, exp_NV.shape))
            else:
                z_CK = tiles.logits(weight_KD, tile, tokens)
                slope_CK = None if transform.softcap is None else 1 - z_CK.tanh() ** 2
                log_p_CK = tiles.finish(z_CK, tile, tokens).sub_(lse_N[tokens, None])
                if grad_entropy_N is None:
                    dz_CK = log_p_CK.exp_().mul_(-g_common)
                else:  # -p (g_common + g_entropy (log p + H))
                    g_entropy = grad_entropy_N[tokens, None].to(tiles.dtype)
                    p_CK = torch.exp(log_p_CK, out=tiles.scratch(1, log_p_CK.shape))
                    shift = g_common + g_entropy * entropy_N[tokens, None]
                    dz_CK = log_p_CK.mul_(-g_entropy).sub_(shift).mul_(p_CK)
            if candidates is not None:
                of_tile, places = candidates.within(tiles, tokens, tile)
                dz_CK[of_tile] = candidate_dz_NE.reshape(-1)[places]
            inside, column = _targets_in(tile, target_ids_N[tokens])
            g_logprob = grad_logprob_N[tokens, None].to(tiles.dtype)
            dz_CK.scatter_add_(1, column, torch.where(inside, g_logprob, 0))
            if slope_CK is not None:
                dz_CK.mul_(slope_CK).mul_(transform.outer)
            if grad_hidden is not None:
                tiles.product(dz_CK, weight_KD, grad_hidden[tokens], beta=1.0)
            if grad_weight is not None:
                tiles.product(dz_CK.T, hidden_ND[tokens], grad_KD, beta=1.0)
            if grad_bias is not None:
                grad_K.add_(dz_CK.sum(0), alpha=transform.inner)
        if grad_weight is not None:
            grad_weight[tile] = grad_KD
        if grad_bias is not None:
            grad_bias[tile] = grad_K
    return grad_hidden, grad_weight, grad_bias
