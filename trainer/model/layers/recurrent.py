"""Recurrent layers on packed rows: gated delta nets, Mamba-2 mixers and short convolutions.

Attention respects rows by its mask or its kernel. A recurrent layer carries a state from token to token, and would
carry it from row to row: transformers' implementations in plain torch take a pack for one row, without an error, which
moves log-probabilities by 0.7 to 6 nats. Here each row of a pack is computed by itself.

On NVIDIA GPUs the kernels of causal-conv1d, flash-linear-attention and mamba-ssm take row boundaries themselves, and
the whole pack is one call, where they are installed.

Covered: Qwen3-Next, Qwen3.5, Falcon-H1, Nemotron-H, Granite 4 hybrids, Bamba, LFM2. Recurrent layers of other classes
are refused by `trainer/model/isolation.py`. Not covered: shared prefixes, whose state would have to be handed on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from trainer.batch.packing import PackedBatch

KERNELS = {
    "GatedDeltaNet": ("causal_conv1d", "fla"),
    "Mixer": ("causal_conv1d", "mamba_ssm"),
    "MambaLayer": ("causal_conv1d", "mamba_ssm"),
    "ShortConv": ("causal_conv1d",),
}
"""By the end of the name of a recurrent layer's class in transformers: the packages of its kernels, which take row
boundaries."""


def isolate_rows(model: nn.Module) -> None:
    """Make every recurrent layer compute each row of a pack by itself, in place; idempotent."""
    for layer in recurrent_layers(model):
        if not isinstance(layer, _RowByRow):
            # The class and not the instance is changed: a copy of the model must compute with its own weights.
            layer.__class__ = _row_by_row(type(layer))


def recurrent_layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if _packages(type(module)) is not None)


def row_arguments(packed: PackedBatch) -> dict[str, torch.Tensor]:
    """Return the arguments of a decoder by which its recurrent layers know the rows of a pack.

    seq_idx: (1, L) int32 row of each token.
    """
    lengths = packed.cu_seqlens.diff()
    rows = torch.arange(packed.num_rows, dtype=torch.int32, device=lengths.device)
    return {"seq_idx": rows.repeat_interleave(lengths, output_size=packed.num_tokens)[None]}


class _RowByRow(nn.Module):
    """Base of recurrent layers that compute each row of a pack by itself."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        seq_idx: torch.Tensor | None = None,
        packed: PackedBatch | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states: (1, L, D). packed: the pack, if the model passes it on, with row lengths on the host.

        attention_mask is that of padded batches; a pack has none.
        """
        compute = super().forward
        if seq_idx is None:
            return compute(hidden_states, *args, attention_mask=attention_mask, **kwargs)
        if hidden_states.is_cuda and _has_kernels(type(self)):
            boundaries = {} if packed is None else {"cu_seq_lens_q": packed.cu_seqlens}
            return compute(hidden_states, *args, attention_mask=None, seq_idx=seq_idx, **boundaries, **kwargs)
        lengths = seq_idx[0].bincount().tolist() if packed is None else list(packed.row_lengths)
        rows = hidden_states.split(lengths, 1)
        return torch.cat([compute(row, *args, attention_mask=None, **kwargs) for row in rows], 1)


@functools.cache
def _row_by_row(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_RowByRow, kind), {})


def _packages(kind: type[nn.Module]) -> tuple[str, ...] | None:
    return next((packages for end, packages in KERNELS.items() if kind.__name__.endswith(end)), None)


@functools.cache
def _has_kernels(kind: type[nn.Module]) -> bool:
    return all(find_spec(package) is not None for package in _packages(kind) or ())
