"""Logits of a head, one tile of the vocabulary and one chunk of the tokens at a time.

Shape legend: _N tokens, _D hidden size, _V vocabulary, _C tokens of a chunk, _K vocabulary entries of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOGITS_BUDGET_GIB = 0.25
"""Memory for the logits of one tile and their intermediates. More is not faster: matrix products reach full speed at a
few hundred tokens."""
TILE_K = 4096
"""Vocabulary entries of a tile. At 4,096 the passes over a row of logits stay in a CPU core's cache, and each kernel
still fills a GPU."""
EXCLUDED = -1e30
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabEntries:
    """Pairs (token, vocabulary entry), sorted by (vocabulary tile, token chunk) so that those of each are a slice."""

    token_index: torch.Tensor
    vocab_id: torch.Tensor
    place: torch.Tensor
    """Index of each pair in the order in which they were given."""
    edges: tuple[int, ...] = ()
    """Where the pairs of each tile and chunk begin, chunks of a tile together, and their end; empty: not sorted yet."""

    @classmethod
    def of(cls, csr: tuple[torch.Tensor, torch.Tensor] | None) -> VocabEntries | None:
        """Make the pairs of offsets (N + 1,) and ids: token n has `ids[offsets[n]:offsets[n + 1]]`."""
        if csr is None:
            return None
        offsets, ids = csr
        token_index = torch.arange(len(offsets) - 1, device=ids.device)
        return cls._of(token_index.repeat_interleave(offsets.diff(), output_size=len(ids)), ids)

    @classmethod
    def of_table(cls, ids_NE: torch.Tensor) -> VocabEntries:
        """Make the pairs of a table with the same number of entries for every token."""
        num_tokens, width = ids_NE.shape
        token_index = torch.arange(num_tokens, device=ids_NE.device)
        return cls._of(token_index.repeat_interleave(width), ids_NE.flatten())

    @classmethod
    def _of(cls, token_index: torch.Tensor, ids: torch.Tensor) -> VocabEntries:
        return cls(token_index=token_index, vocab_id=ids.long(), place=torch.arange(len(ids), device=ids.device))

    def sorted_by(self, tiles: LogitTiles) -> VocabEntries:
        """Return the pairs in the order of these tiles and chunks; waits for the device once, for all of them."""
        if self.edges:
            return self
        parts = self.vocab_id // tiles.width * len(tiles.chunks) + self.token_index // tiles.chunk
        part, order = parts.sort(stable=True)
        all_parts = torch.arange(len(tiles.tiles) * len(tiles.chunks) + 1, device=part.device)
        return VocabEntries(
            token_index=self.token_index[order],
            vocab_id=self.vocab_id[order],
            place=self.place[order],
            edges=tuple(torch.searchsorted(part, all_parts).tolist()),
        )

    def within(
        self, tiles: LogitTiles, tokens: slice, tile: slice
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return the index (rows, columns) of the pairs in one (C, K) tile, and their places."""
        part = tile.start // tiles.width * len(tiles.chunks) + tokens.start // tiles.chunk
        pairs = slice(self.edges[part], self.edges[part + 1])
        return (self.token_index[pairs] - tokens.start, self.vocab_id[pairs] - tile.start), self.place[pairs]

    def mask(self, tiles: LogitTiles, tokens: slice, tile: slice) -> torch.Tensor:
        """Return the (C, K) bool mask of one tile."""
        index, places = self.within(tiles, tokens, tile)
        shape = (tokens.stop - tokens.start, tile.stop - tile.start)
        mask = torch.zeros(shape, dtype=torch.bool, device=places.device)
        mask[index] = True
        return mask


class LogitTiles:
    """Iteration over (vocabulary tile × token chunk), shared by forward and backward."""

    def __init__(
        self,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        transform: LogitTransform,
        support: VocabEntries | None,
        rounded_to: torch.dtype | None,
    ) -> None:
        """rounded_to: dtype to which operands of products are rounded first, as autocast does; or None."""
        self.weight_VD, self.bias_V = weight_VD, bias_V
        self.transform = transform
        self.dtype = torch.promote_types(torch.promote_types(hidden_ND.dtype, weight_VD.dtype), torch.float32)
        self.rounded_to = rounded_to
        # GPUs multiply half-precision operands into float32 sums; elsewhere the operands are widened first.
        operand_dtype = rounded_to or torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
        is_half = operand_dtype in (torch.bfloat16, torch.float16)
        self.operand_dtype = operand_dtype if is_half and hidden_ND.is_cuda else self.dtype
        self.hidden_ND = self.operand(hidden_ND.detach())

        (num_tokens, _), num_vocab = hidden_ND.shape, len(weight_VD)
        self.tiles = [slice(k, min(k + TILE_K, num_vocab)) for k in range(0, num_vocab, TILE_K)]
        self.width = width = min(TILE_K, num_vocab)
        affordable = max(1, int(LOGITS_BUDGET_GIB * 2**30) // (_BUFFERS * self.dtype.itemsize * width))
        num_chunks = max(1, -(-num_tokens // affordable))
        self.chunk = chunk = max(1, -(-num_tokens // num_chunks))  # equal ones, so that none is inefficiently short
        self.chunks = [slice(c, min(c + chunk, num_tokens)) for c in range(0, num_tokens, chunk)]
        self.support = None if support is None else support.sorted_by(self)
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
            z_CK.masked_fill_(~self.support.mask(self, tokens, tile), EXCLUDED)
        return z_CK
