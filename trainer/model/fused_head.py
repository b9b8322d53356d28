"""LM head fused with log-probability and entropy: logits exist for one tile at a time.

With a vocabulary of 151,936 the logits of 8,192 tokens take 4.6 GiB in float32, and softmax and its gradient triple
that. Here the vocabulary is processed in tiles (each tile of the weight is read, and its gradient written, once) and
the tokens in chunks. A running log-sum-exp joins the tiles; backward recomputes each tile. Kept between forward and
backward are the hidden states, the weight and three numbers per token. If all logits fit one tile and one chunk, their
exponentials are in memory anyway when forward ends; they are kept, and backward recomputes nothing.

Covered: bias, logit scale, final softcap, temperature, restricted sampling support; inputs from float64 to bfloat16 and
autocast, which rounds the operands of products; products accumulated and softmax taken in float32 or wider. Not
covered: heads that are not one linear layer, second derivatives.

Shape legend: _N target tokens, _D hidden size, _V vocabulary, _C tokens of a chunk, _K vocabulary entries of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

LOGITS_BUDGET_GIB = 0.25
"""Memory for the logits of one tile and their intermediates. More is not faster: matrix products reach full speed at a
few hundred tokens."""
TILE_K = 4096
"""Vocabulary entries of a tile. At 4,096 the passes over a row of logits stay in a CPU core's cache, and each kernel
still fills a GPU."""
_EXCLUDED = -1e30
"""Logit of a token outside the support. Finite, so that a tile without supported tokens gives no NaN; its exponential
is 0 as soon as the running maximum is a real logit."""
_BUFFERS = 3
"""Arrays of a tile's size that exist at a time: logits, probabilities, slope of the softcap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """Map from the head's output z to the logits that were sampled from: softcap(z · scale) / temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    softcap: float | None = None
    """Gemma's `final_logit_softcapping`: z becomes softcap · tanh(z / softcap)."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature must be positive, found {self.temperature}: greedy tokens have no distribution to train"
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, found {self.softcap}")

    @property
    def inner(self) -> float:
        """Factor of z before tanh; without a softcap, the only factor."""
        return self.scale / (self.temperature if self.softcap is None else self.softcap)

    @property
    def outer(self) -> float:
        """Factor of tanh; 1 without a softcap."""
        return 1.0 if self.softcap is None else self.softcap / self.temperature


IDENTITY = LogitTransform()


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
    if hidden_ND.ndim != 2 or weight_VD.ndim != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden states (tokens, D) and weight (V, D) do not match: found {tuple(hidden_ND.shape)} and "
            f"{tuple(weight_VD.shape)}. A weight of shape (0,) is a ZeRO-3 partition outside its module's forward"
        )
    if support is not None and len(support[0]) != len(target_ids_N) + 1:
        raise ValueError(f"found support for {len(support[0]) - 1} tokens, expected {len(target_ids_N)} as targets")
    return _FusedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, target_ids_N, transform, _Support.of(support), with_entropy
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
        self, input: torch.Tensor, target_ids_N: torch.Tensor | None = None, **settings: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return plain logits without targets; else logprob_N and entropy_N by `fused_logprobs` with its settings."""
        if target_ids_N is None:
            return F.linear(input, self.weight, self.bias)
        return fused_logprobs(input, self.weight, target_ids_N, bias_V=self.bias, **settings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Support:
    """The (token, vocabulary entry) pairs that may be sampled, sorted by vocabulary entry so that a tile is a slice."""

    token_index: torch.Tensor
    vocab_id: torch.Tensor

    @classmethod
    def of(cls, csr: tuple[torch.Tensor, torch.Tensor] | None) -> _Support | None:
        if csr is None:
            return None
        offsets, ids = csr
        token_index = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=ids.device), offsets.diff())
        vocab_id, order = ids.long().sort(stable=True)
        return cls(token_index=token_index[order], vocab_id=vocab_id)

    def keep(self, tokens: slice, tile: slice) -> torch.Tensor:
        """Return the (C, K) bool mask of one tile."""
        edges = torch.tensor([tile.start, tile.stop], device=self.vocab_id.device)
        low, high = torch.searchsorted(self.vocab_id, edges).tolist()
        token_index, vocab_id = self.token_index[low:high], self.vocab_id[low:high]
        chosen = (token_index >= tokens.start) & (token_index < tokens.stop)
        mask = torch.zeros(tokens.stop - tokens.start, tile.stop - tile.start, dtype=torch.bool, device=vocab_id.device)
        mask[token_index[chosen] - tokens.start, vocab_id[chosen] - tile.start] = True
        return mask


class _FusedLogprobs(torch.autograd.Function):
    """Autograd of `fused_logprobs`. Per token, with logits z, p = softmax(z), entropy H and target y:

    ∂ logp / ∂z_j = [j = y] - p_j        ∂H / ∂z_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_ids_N: torch.Tensor,
        transform: LogitTransform,
        support: _Support | None,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Autocast rounds the operands of products, except float64.
        device, rounded_to = hidden_ND.device.type, None
        if torch.is_autocast_enabled(device) and torch.float64 not in (hidden_ND.dtype, weight_VD.dtype):
            rounded_to = torch.get_autocast_dtype(device)
        tiles = _Tiles(hidden_ND, weight_VD, bias_V, transform, support, rounded_to)
        with torch.autocast(device, enabled=False):
            lse_N, target_logit_N, entropy_N, exp_NV, sum_N = _normalize(tiles, target_ids_N, with_entropy)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_ids_N, lse_N, entropy_N, exp_NV, sum_N)
        ctx.transform, ctx.support, ctx.with_entropy, ctx.rounded_to = transform, support, with_entropy, rounded_to
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        # An entropy that is only reported then has a None gradient, not zeros, and backward skips its part.
        ctx.set_materialize_grads(False)
        return target_logit_N - lse_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return *_gradients(ctx, *grads), None, None, None, None


class _Tiles:
    """Iteration over (vocabulary tile × token chunk), shared by forward and backward."""

    def __init__(
        self,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        transform: LogitTransform,
        support: _Support | None,
        rounded_to: torch.dtype | None,
    ) -> None:
        """rounded_to: dtype to which operands of products are rounded first, as autocast does; or None."""
        self.weight_VD, self.bias_V = weight_VD, bias_V
        self.transform, self.support = transform, support
        self.dtype = torch.promote_types(torch.promote_types(hidden_ND.dtype, weight_VD.dtype), torch.float32)
        self.rounded_to = rounded_to
        # GPUs multiply half-precision operands into float32 sums; elsewhere the operands are widened first.
        operand_dtype = rounded_to or torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
        is_half = operand_dtype in (torch.bfloat16, torch.float16)
        self.operand_dtype = operand_dtype if is_half and hidden_ND.is_cuda else self.dtype
        self.hidden_ND = self.operand(hidden_ND.detach())

        (num_tokens, _), num_vocab = hidden_ND.shape, len(weight_VD)
        self.tiles = [slice(k, min(k + TILE_K, num_vocab)) for k in range(0, num_vocab, TILE_K)]
        width = min(TILE_K, num_vocab)
        affordable = max(1, int(LOGITS_BUDGET_GIB * 2**30) // (_BUFFERS * self.dtype.itemsize * width))
        num_chunks = max(1, -(-num_tokens // affordable))
        chunk = max(1, -(-num_tokens // num_chunks))  # equal chunks, so that none is inefficiently short
        self.chunks = [slice(c, min(c + chunk, num_tokens)) for c in range(0, num_tokens, chunk)]
        # Reused: the kernel would map and clear fresh memory for every tile.
        self.buffers = [torch.empty(chunk * width, dtype=self.dtype, device=hidden_ND.device) for _ in range(2)]

    def weight(self, tile: slice) -> torch.Tensor:
        return self.operand(self.weight_VD.detach()[tile])

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as an operand of a product: rounded, then cast."""
        return (x if self.rounded_to is None else x.to(self.rounded_to)).to(self.operand_dtype)

    def scratch(self, index: int, shape: torch.Size) -> torch.Tensor:
        return self.buffers[index][: shape.numel()].view(shape)

    def product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, beta: float = 0.0) -> torch.Tensor:
        """Compute out = beta · out + inner · a @ b, accumulated in the wide dtype."""
        if self.operand_dtype == self.dtype:
            return out.addmm_(self.operand(a), self.operand(b), beta=beta, alpha=self.transform.inner)
        product = torch.mm(self.operand(a), self.operand(b), out_dtype=self.dtype)
        if beta:
            return out.mul_(beta).add_(product, alpha=self.transform.inner)
        return out.copy_(product).mul_(self.transform.inner)

    def logits(self, weight_KD: torch.Tensor, tile: slice, tokens: slice) -> torch.Tensor:
        """Return the scaled (C, K) logits before tanh, in buffer 0; without a softcap, the logits themselves."""
        hidden_CD = self.hidden_ND[tokens]
        z_CK = self.product(hidden_CD, weight_KD.T, self.scratch(0, torch.Size((len(hidden_CD), len(weight_KD)))))
        if self.bias_V is not None:
            z_CK.add_(self.bias_V.detach()[tile].to(self.dtype), alpha=self.transform.inner)
        return z_CK

    def finish(self, z_CK: torch.Tensor, tile: slice, tokens: slice) -> torch.Tensor:
        """Apply softcap, temperature and support, in place."""
        if self.transform.softcap is not None:
            z_CK.tanh_().mul_(self.transform.outer)
        if self.support is not None:
            z_CK.masked_fill_(~self.support.keep(tokens, tile), _EXCLUDED)
        return z_CK


def _targets_in(tile: slice, target_ids_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two (C, 1) tensors: True if the target lies in the tile, and its column there (0 if not)."""
    column = target_ids_C - tile.start
    inside = (column >= 0) & (column < tile.stop - tile.start)
    return inside[:, None], torch.where(inside, column, 0)[:, None]


def _normalize(
    tiles: _Tiles, target_ids_N: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute log-sum-exp, target logit and entropy per token, in one pass over the logits (online softmax).

    Also returns the exponentials exp(z - m), (N, V), if all logits are one tile and one chunk, and their sum s, (N, 1).

    Running over tiles: m = largest logit so far, s = Σ exp(z - m), t = Σ exp(z - m) (z - m).
    A new maximum m' rescales them by a = exp(m - m'): s' = a s, t' = a (t + (m - m') s).
    """
    shape = (len(target_ids_N), 1)
    wide = {"dtype": tiles.dtype, "device": target_ids_N.device}
    m, s, t = torch.full(shape, _EXCLUDED, **wide), torch.zeros(shape, **wide), torch.zeros(shape, **wide)
    e_CK = None
    target_logit = torch.full(shape, _EXCLUDED, **wide)
    for tile in tiles.tiles:
        weight_KD = tiles.weight(tile)
        for tokens in tiles.chunks:
            z_CK = tiles.finish(tiles.logits(weight_KD, tile, tokens), tile, tokens)
            inside, column = _targets_in(tile, target_ids_N[tokens])
            target_logit[tokens] = torch.where(inside, z_CK.gather(1, column), target_logit[tokens])
            new_m = torch.maximum(m[tokens], z_CK.amax(1, keepdim=True))
            shift = m[tokens] - new_m
            decay = shift.exp()
            z_CK.sub_(new_m)
            e_CK = torch.exp(z_CK, out=tiles.scratch(1, z_CK.shape)) if with_entropy else z_CK.exp_()
            if with_entropy:
                t[tokens] = decay * (t[tokens] + shift * s[tokens]) + torch.linalg.vecdot(e_CK, z_CK)[:, None]
            s[tokens] = decay * s[tokens] + e_CK.sum(1, keepdim=True)
            m[tokens] = new_m
    if tiles.support is not None:
        target_logit = torch.where(target_logit == _EXCLUDED, -torch.inf, target_logit)
    log_s = s.log()
    entropy = log_s - t / s if with_entropy else torch.zeros_like(s)
    is_whole = len(tiles.tiles) == len(tiles.chunks) == 1 and tiles.transform.softcap is None
    return (m + log_s)[:, 0], target_logit[:, 0], entropy[:, 0], e_CK if is_whole else None, s


def _gradients(
    ctx: Any, grad_logprob_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute gradients of hidden states, weight and bias, each None if not needed.

    Recomputes the logits unless `_normalize` has kept their exponentials. Sums are in the wide dtype: over tiles for
    hidden states, over chunks for a tile of the weight, which is rounded to the weight's dtype once.
    """
    hidden_ND, weight_VD, bias_V, target_ids_N, lse_N, entropy_N, exp_NV, sum_N = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    transform: LogitTransform = ctx.transform
    tiles = _Tiles(hidden_ND, weight_VD, bias_V, transform, ctx.support, ctx.rounded_to)
    hidden_ND = tiles.hidden_ND
    grad_logprob_N = torch.zeros_like(lse_N) if grad_logprob_N is None else grad_logprob_N
    grad_entropy_N = grad_entropy_N if ctx.with_entropy else None
    grad_hidden = torch.zeros(hidden_ND.shape, dtype=tiles.dtype, device=hidden_ND.device) if needs_hidden else None
    grad_weight = torch.empty_like(weight_VD) if needs_weight else None
    grad_bias = torch.empty_like(bias_V) if needs_bias and bias_V is not None else None
    tile_KD = torch.empty(min(TILE_K, len(weight_VD)), weight_VD.shape[1], dtype=tiles.dtype, device=weight_VD.device)
    for tile in tiles.tiles:
        weight_KD = tiles.weight(tile)
        grad_KD = tile_KD[: len(weight_KD)].zero_()
        grad_K = torch.zeros(len(weight_KD), dtype=tiles.dtype, device=weight_VD.device)
        for tokens in tiles.chunks:
            g_logprob = grad_logprob_N[tokens, None].to(tiles.dtype)
            slope_CK = None
            if exp_NV is not None and grad_entropy_N is None:
                dz_CK = torch.mul(exp_NV, -g_logprob / sum_N, out=tiles.scratch(0, exp_NV.shape))
            else:
                z_CK = tiles.logits(weight_KD, tile, tokens)
                slope_CK = None if transform.softcap is None else 1 - z_CK.tanh() ** 2
                log_p_CK = tiles.finish(z_CK, tile, tokens).sub_(lse_N[tokens, None])
                if grad_entropy_N is None:
                    dz_CK = log_p_CK.exp_().mul_(-g_logprob)
                else:  # -p (g_logprob + g_entropy (log p + H))
                    g_entropy = grad_entropy_N[tokens, None].to(tiles.dtype)
                    p_CK = torch.exp(log_p_CK, out=tiles.scratch(1, log_p_CK.shape))
                    shift = g_logprob + g_entropy * entropy_N[tokens, None]
                    dz_CK = log_p_CK.mul_(-g_entropy).sub_(shift).mul_(p_CK)
            inside, column = _targets_in(tile, target_ids_N[tokens])
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
