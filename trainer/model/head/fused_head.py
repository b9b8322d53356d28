"""LM head fused with log-probability and entropy: logits exist for one tile at a time.

With a vocabulary of 151,936 the logits of 8,192 tokens take 4.6 GiB in float32, and softmax and its gradient triple
that. Here the vocabulary is processed in tiles (each tile of the weight is read, and its gradient written, once) and
the tokens in chunks. A running log-sum-exp joins the tiles; backward recomputes each tile. Kept between forward and
backward are the hidden states, the weight and three numbers per token; on a CPU also the softmax over a small
vocabulary. Kernels on a GPU (logit_kernels.py) read a float32 tile once per direction; a CPU uses logit_chain.py.

On request the same passes give the log-probabilities of a table of further vocabulary entries per token, its
candidates, and the log-probability of all others together (`fused_candidates`). A divergence from a teacher that names
its most probable tokens is a function of these (trainer/objective/distillation/divergence.py).

Covered: bias, logit scale, final softcap, temperature, restricted sampling support (support_head.py); inputs from
float64 to bfloat16 and autocast, which rounds the operands of products; products accumulated and softmax taken in
float32 or wider. Not covered: heads that are not one linear layer, second derivatives.

Shape legend: _N target tokens, _D hidden size, _V vocabulary, _C tokens of a chunk, _K vocabulary entries of a tile,
_E candidates of a token.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.trainer.model.head import logit_chain
from lockstep.trainer.model.head.logit_tiles import IDENTITY, Gradients, GradientSums, LogitTiles, LogitTransform, Sums
from lockstep.trainer.model.layers.autocast import operand_dtype

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
        support: offsets (N + 1,) and token ids, int64; token n was drawn from `ids[offsets[n]:offsets[n + 1]]`, which
            are distinct, and π is normalized over these alone. A target outside its support has log-probability -inf.
            Waits for the device once.
        with_entropy: False returns zeros, at no cost.

    Returns:
        logprob_N and entropy_N in nats; float32, or float64 if an input is.
    """
    _check_shapes(hidden_ND, weight_VD)
    if support is not None and len(support[0]) != len(target_ids_N) + 1:
        raise ValueError(f"found support for {len(support[0]) - 1} tokens, expected {len(target_ids_N)} as targets")
    if support is not None:
        from lockstep.trainer.model.head.support_head import SupportLogprobs  # only truncated sampling needs it

        return SupportLogprobs.apply(hidden_ND, weight_VD, bias_V, target_ids_N, transform, *support, with_entropy)
    logprob_N, entropy_N, _ = _FusedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, target_ids_N, transform, with_entropy, None
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
    return _FusedLogprobs.apply(hidden_ND, weight_VD, bias_V, target_ids_N, transform, with_entropy, candidate_ids_NE)


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
        with_entropy: bool,
        candidate_ids_NE: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rounded_to = operand_dtype(hidden_ND, weight_VD)
        tiles = LogitTiles(hidden_ND, weight_VD, bias_V, transform, rounded_to)
        sums = Sums.zeros(target_ids_N, candidate_ids_NE, tiles.dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            softmax_NV = _add_tiles(tiles, sums, with_entropy=with_entropy)
        log_s_N = sums.s_N.log()
        lse_N = sums.m_N + log_s_N
        entropy_N = log_s_N - sums.t_N / sums.s_N if with_entropy else torch.zeros_like(lse_N)
        logp_NF = lse_N[:, None]
        if sums.candidate_logit_NE is not None:
            log_rest_N = (sums.r_N.log() - log_s_N).clamp_min(REST_FLOOR)
            logp_NF = torch.cat([sums.candidate_logit_NE - logp_NF, log_rest_N[:, None]], 1)
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, target_ids_N, candidate_ids_NE, lse_N, entropy_N, softmax_NV, logp_NF
        )
        ctx.transform, ctx.rounded_to, ctx.with_entropy = transform, rounded_to, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        if candidate_ids_NE is None:
            ctx.mark_non_differentiable(logp_NF)
        # An entropy that is only reported then has a None gradient, not zeros, and backward skips its part.
        ctx.set_materialize_grads(False)
        return sums.target_logit_N - lse_N, entropy_N, logp_NF

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return *_gradients(ctx, *grads), None, None, None, None


def _arithmetic(tiles: LogitTiles) -> ModuleType:
    """Return the module that computes a tile."""
    if not tiles.uses_kernels:
        return logit_chain
    from lockstep.trainer.model.head import logit_kernels  # Triton is a part of torch's CUDA builds

    return logit_kernels


def _add_tiles(tiles: LogitTiles, sums: Sums, *, with_entropy: bool) -> torch.Tensor | None:
    """Sum over all tiles. Returns the softmax over a small vocabulary, for a backward without candidates."""
    arithmetic = _arithmetic(tiles)
    softmax_NV = tiles.new_softmax() if sums.candidate_ids_NE is None else None
    for tile in tiles.tiles:
        weight_KD = tiles.weight(tile)
        for tokens in tiles.chunks:
            settings = {} if softmax_NV is None else {"out": softmax_NV[tokens]}
            z_CK = tiles.products(weight_KD, tokens)
            arithmetic.statistics(tiles, tile, z_CK, sums.of(tokens), with_entropy=with_entropy, **settings)
    return softmax_NV


def _gradients(
    ctx: Any,
    grad_logprob_N: torch.Tensor | None,
    grad_entropy_N: torch.Tensor | None,
    grad_logp_NF: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute gradients of hidden states, weight and bias, each None if not needed.

    Recomputes the logits unless forward has kept their softmax. Sums are in the wide dtype: over tiles for hidden
    states, over chunks for a tile of the weight, which is rounded to the weight's dtype once.

    The logits outside of the candidates get -p (g - g_rest / r), where g is the sum over all outputs that are divided
    by the same sum of exponentials. Those of the candidates are set apart: there g_rest / r does not enter, and
    subtracting it again would cancel nothing but digits where r is small.
    """
    hidden_ND, weight_VD, bias_V, target_ids_N, candidate_ids_NE, *computed = ctx.saved_tensors
    lse_N, entropy_N, softmax_NV, logp_NF = computed
    tiles = LogitTiles(hidden_ND, weight_VD, bias_V, ctx.transform, ctx.rounded_to)
    grad_logprob_N = torch.zeros_like(lse_N) if grad_logprob_N is None else grad_logprob_N.to(tiles.dtype)
    common_N = grad_logprob_N = grad_logprob_N.contiguous()
    if grad_entropy_N is not None:
        grad_entropy_N = grad_entropy_N.to(tiles.dtype).contiguous() if ctx.with_entropy else None
    candidate_dz_NE = None
    if grad_logp_NF is not None:
        grad_logp_NF = grad_logp_NF.to(tiles.dtype)
        all_N = common_N + grad_logp_NF.sum(1)
        common_N = all_N - grad_logp_NF[:, -1] * (-logp_NF[:, -1]).exp()
        divided_NF = all_N[:, None]
        if grad_entropy_N is not None:
            divided_NF = divided_NF + grad_entropy_N[:, None] * (logp_NF + entropy_N[:, None])
        candidate_dz_NE = (grad_logp_NF - logp_NF.exp() * divided_NF)[:, :-1].contiguous()
    rows = Gradients(
        target_ids_N=target_ids_N.contiguous(),
        candidate_ids_NE=None if candidate_ids_NE is None else candidate_ids_NE.contiguous(),
        lse_N=lse_N,
        entropy_N=entropy_N,
        common_N=common_N,
        grad_logprob_N=grad_logprob_N,
        grad_entropy_N=grad_entropy_N,
        candidate_dz_NE=candidate_dz_NE,
    )
    arithmetic, sums = _arithmetic(tiles), GradientSums(tiles, *ctx.needs_input_grad[:3])
    for tile in tiles.tiles:
        weight_KD = tiles.weight(tile)
        for tokens in tiles.chunks:
            if softmax_NV is not None:
                dz_CK = logit_chain.gradient_of_softmax(tiles, tile, softmax_NV[tokens], rows.of(tokens))
            else:
                dz_CK = arithmetic.gradient(tiles, tile, tiles.products(weight_KD, tokens), rows.of(tokens))
            sums.add(dz_CK, weight_KD, tile, tokens)
    return sums.hidden_ND, sums.weight_VD, sums.bias_V
