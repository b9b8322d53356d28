"""Logits of a head, one tile of the vocabulary and one chunk of the tokens at a time.

Shape legend: _N tokens, _D hidden size, _V vocabulary, _C tokens of a chunk, _K vocabulary entries of a tile,
_E candidates of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import torch

LOGITS_BUDGET_GIB = 0.25
"""Memory for the logits of one tile and their intermediates on a GPU. More is not faster: matrix products reach full
speed at a few hundred tokens."""
CPU_LOGITS_BUDGET_GIB = 2**-6
"""The same on a CPU, where all passes over a tile then stay in the caches."""
TILE_K = 4096
"""Vocabulary entries of a tile. At 4,096 the passes over a row of logits stay in a CPU core's cache, and each kernel
still fills a GPU."""
EXCLUDED = -1e30
"""Logit of a token outside the support, and the maximum before the first tile. Finite, so that no difference is NaN."""
KEPT_GIB = LOGITS_BUDGET_GIB / 3
"""Largest softmax of a whole small vocabulary that forward keeps, so that backward computes no logits again."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Tensors whose first dimension is tokens, contiguous."""

    target_ids_N: torch.Tensor
    candidate_ids_NE: torch.Tensor | None

    def of(self, tokens: slice) -> Self:
        """Return views of some tokens."""
        whole = [getattr(self, field.name) for field in fields(self)]
        parts: list[Any] = [None if x is None else x[tokens] for x in whole]
        return type(self)(*parts)


@dataclass(frozen=True, slots=True, eq=False)
class Sums(_Rows):
    """Numbers per token over the tiles so far (online softmax); a tile's arithmetic updates them in place.

    m = largest logit, s = Σ exp(z - m), t = Σ exp(z - m) (z - m), r = s without the candidates. A new maximum m'
    rescales them by a = exp(m - m'): s' = a s, r' = a r, t' = a (t + (m - m') s).
    """

    m_N: torch.Tensor
    s_N: torch.Tensor
    t_N: torch.Tensor
    r_N: torch.Tensor
    target_logit_N: torch.Tensor
    candidate_logit_NE: torch.Tensor | None

    @classmethod
    def zeros(cls, target_ids_N: torch.Tensor, candidate_ids_NE: torch.Tensor | None, dtype: torch.dtype) -> Sums:
        """Make the sums before the first tile. Logits are NaN until the tile with their id, so a wrong id shows."""
        m_N, s_N, t_N, r_N, logit_N = target_ids_N.new_zeros(5, len(target_ids_N), dtype=dtype)
        ids_NE = None if candidate_ids_NE is None else candidate_ids_NE.contiguous()
        logit_NE = None if ids_NE is None else torch.full_like(ids_NE, torch.nan, dtype=dtype)
        logit_N.fill_(torch.nan)
        return cls(target_ids_N.contiguous(), ids_NE, m_N.fill_(EXCLUDED), s_N, t_N, r_N, logit_N, logit_NE)


@dataclass(frozen=True, slots=True, eq=False)
class Gradients(_Rows):
    """Numbers per token from which the gradient of any tile's logits follows:

    dz = -p (common + entropy's gradient · (log p + H)); candidates have their own instead, and the target's is added.
    """

    lse_N: torch.Tensor
    entropy_N: torch.Tensor
    common_N: torch.Tensor
    grad_logprob_N: torch.Tensor
    grad_entropy_N: torch.Tensor | None
    candidate_dz_NE: torch.Tensor | None


class LogitTiles:
    """Iteration over (vocabulary tile × token chunk), shared by forward and backward."""

    def __init__(
        self,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        transform: LogitTransform,
        rounded_to: torch.dtype | None,
    ) -> None:
        """rounded_to: dtype to which operands of products are rounded first, as autocast does; or None."""
        self.weight_VD, self.transform = weight_VD.detach(), transform
        self.device = hidden_ND.device
        self.dtype = torch.promote_types(torch.promote_types(hidden_ND.dtype, weight_VD.dtype), torch.float32)
        self.rounded_to = rounded_to
        # GPUs multiply half-precision operands into float32 sums; elsewhere the operands are widened first.
        operand_dtype = rounded_to or torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
        is_half = operand_dtype in (torch.bfloat16, torch.float16)
        self.operand_dtype = operand_dtype if is_half and hidden_ND.is_cuda else self.dtype
        self.hidden_ND = self.operand(hidden_ND.detach())
        # Products of one dtype take a factor for free; what they lack is for the passes over their results.
        self.in_product = transform.inner if self.operand_dtype == self.dtype else 1.0
        self.inner = transform.inner / self.in_product
        self.bias_V = None if bias_V is None else bias_V.detach().to(self.dtype) * self.in_product

        (num_tokens, _), num_vocab = hidden_ND.shape, len(weight_VD)
        self.tiles = [slice(k, min(k + TILE_K, num_vocab)) for k in range(0, num_vocab, TILE_K)]
        self.width = width = min(TILE_K, num_vocab)
        self.budget = int((LOGITS_BUDGET_GIB if hidden_ND.is_cuda else CPU_LOGITS_BUDGET_GIB) * 2**30)
        affordable = max(1, self.budget // (self._bytes_per_logit * width))
        num_chunks = max(1, -(-num_tokens // affordable))
        self.chunk = chunk = max(1, -(-num_tokens // num_chunks))  # equal ones, so that none is inefficiently short
        self.chunks = [slice(c, min(c + chunk, num_tokens)) for c in range(0, num_tokens, chunk)]
        self._buffers: dict[int, torch.Tensor] = {}

    @property
    def uses_kernels(self) -> bool:
        """True if Triton's kernels compute a tile; else torch's operations do."""
        return self.hidden_ND.is_cuda and self.dtype == torch.float32

    def new_softmax(self) -> torch.Tensor | None:
        """Return memory for a softmax (N, V) that is to be kept; None where backward computes the logits again."""
        shape = (len(self.hidden_ND), len(self.weight_VD))
        is_small = shape[0] * shape[1] * self.dtype.itemsize <= KEPT_GIB * 2**30 and len(self.tiles) == 1
        is_kept = is_small and not self.uses_kernels and self.transform.softcap is None
        return torch.empty(shape, dtype=self.dtype, device=self.device) if is_kept else None

    @property
    def _bytes_per_logit(self) -> int:
        if self.uses_kernels:  # logits, and their gradient if it is in half precision
            return self.dtype.itemsize + self.operand_dtype.itemsize % self.dtype.itemsize
        return (2 if self.transform.softcap is None else 3) * self.dtype.itemsize  # and probabilities, softcap's slope

    def weight(self, tile: slice) -> torch.Tensor:
        return self.operand(self.weight_VD[tile])

    def bias(self, tile: slice) -> torch.Tensor | None:
        """Return what to add to a tile of products, in the wide dtype."""
        return None if self.bias_V is None else self.bias_V[tile]

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as an operand of a product: rounded, then cast."""
        return (x if self.rounded_to is None else x.to(self.rounded_to)).to(self.operand_dtype)

    def scratch(self, index: int, shape: torch.Size, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory that later calls with this index share: fresh memory would be mapped and cleared each time."""
        if index not in self._buffers:
            size = self.chunk * self.width
            self._buffers[index] = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        return self._buffers[index][: shape.numel()].view(shape)

    def product(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, accumulates: bool = False
    ) -> torch.Tensor:
        """Compute out = in_product · a @ b of operands, or add it to `out`, with sums in the wide dtype."""
        if self.operand_dtype == self.dtype:
            return out.addmm_(a, b, beta=float(accumulates), alpha=self.in_product)
        if accumulates:
            return torch.addmm(out, a, b, out_dtype=self.dtype, out=out)
        return torch.mm(a, b, out_dtype=self.dtype, out=out)

    def products(self, weight_KD: torch.Tensor, tokens: slice) -> torch.Tensor:
        """Return a (C, K) tile of the head's output in buffer 0: with `in_product`, without bias."""
        hidden_CD = self.hidden_ND[tokens]
        return self.product(hidden_CD, weight_KD.T, self.scratch(0, torch.Size((len(hidden_CD), len(weight_KD)))))


class GradientSums:
    """Gradients of hidden states, weight and bias, summed over tiles and chunks from those of the products."""

    def __init__(self, tiles: LogitTiles, needs_hidden: bool, needs_weight: bool, needs_bias: bool) -> None:
        self._tiles, weight_VD = tiles, tiles.weight_VD
        wide = {"dtype": tiles.dtype, "device": tiles.device}
        new = torch.empty_like if tiles.chunks else torch.zeros_like
        self.hidden_ND = torch.empty_like(tiles.hidden_ND, dtype=tiles.dtype) if needs_hidden else None
        self.weight_VD = new(weight_VD, memory_format=torch.contiguous_format) if needs_weight else None
        self.bias_V = torch.zeros(len(weight_VD), **wide) if needs_bias and tiles.bias_V is not None else None
        is_summed_apart = needs_weight and weight_VD.dtype != tiles.dtype
        self._tile_KD = torch.empty(tiles.width, weight_VD.shape[1], **wide) if is_summed_apart else None

    def add(self, dz_CK: torch.Tensor, weight_KD: torch.Tensor, tile: slice, tokens: slice) -> None:
        """Add one tile. Chunks of a tile must come one after the other, and the first tile of a chunk first."""
        tiles = self._tiles
        if self.bias_V is not None:
            self.bias_V[tile].add_(dz_CK.sum(0, dtype=tiles.dtype), alpha=tiles.in_product)
        dz_CK = tiles.operand(dz_CK)
        if self.hidden_ND is not None:
            tiles.product(dz_CK, weight_KD, self.hidden_ND[tokens], accumulates=tile.start > 0)
        if self.weight_VD is None:
            return
        sum_KD = self.weight_VD[tile] if self._tile_KD is None else self._tile_KD[: len(weight_KD)]
        tiles.product(dz_CK.T, tiles.hidden_ND[tokens], sum_KD, accumulates=tokens.start > 0)
        if self._tile_KD is not None and tokens == tiles.chunks[-1]:
            self.weight_VD[tile] = sum_KD
