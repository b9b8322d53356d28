"""Adapters on a CPU: requests without one, and cost.

vLLM 0.32 multiplies on a CPU by fetching the matrices of each token (`bgmv_shrink` in vllm/lora/ops/torch_ops), rank ×
inputs numbers per token and layer. Tokens without an adapter have index -1, which takes the matrices of the last slot:
in a batch with other requests the base samples with an adapter, and its logprobs are wrong by 1. Here the tokens of
each slot are multiplied together, and those without an adapter are left alone.

The change of a token does not depend on the tokens beside it, as the rest of the layer does not: matrix products of few
rows take other kernels, with another order of summation, so rows are multiplied in multiples of `_BLOCK`. Which
requests share a batch depends on when they arrive; a resumed run would differ in its last bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

_REPAIRED = "_by_slot"
_BLOCK = 16  # tokens


def install() -> None:
    """Replace the product of linear layers; may be called repeatedly."""
    from vllm.lora.layers import base_linear
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    update = PunicaWrapperCPU.update_metadata
    if _REPAIRED in update.__dict__:
        return

    def update_metadata(self: PunicaWrapperCPU, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        self.lockstep_slots = by_slot(self.token_lora_indices)  # type: ignore[attr-defined]

    def add_lora_linear(
        self: PunicaWrapperCPU,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        slots: list[tuple[int, torch.Tensor | None]] = self.lockstep_slots  # type: ignore[attr-defined]
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in slots:
            inputs, end = _padded(x if rows is None else x[rows]), 0
            num_tokens = len(x) if rows is None else len(rows)
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                begin, end = end, end + size
                change = ((inputs @ a[slot, 0].T) @ b[slot, 0, :size].T)[:num_tokens]
                if scale != 1:
                    change *= scale
                if rows is None:
                    y[:, begin:end] += change
                else:
                    y[:, begin:end].index_add_(0, rows, change)

    # vLLM reads the device of the weights, which a quantized layer no longer has: its kernel packed them.
    base_linear._get_lora_device = lambda base_layer: torch.device("cpu")  # pyright: ignore[reportPrivateImportUsage]
    update_metadata.__dict__[_REPAIRED] = True
    PunicaWrapperCPU.update_metadata = update_metadata  # type: ignore[method-assign]
    PunicaWrapperCPU.add_lora_linear = add_lora_linear  # type: ignore[method-assign,assignment]


def by_slot(indices: torch.Tensor) -> list[tuple[int, torch.Tensor | None]]:
    """Return each slot with the rows of its tokens; None: all. indices: (tokens,), -1 for tokens without an adapter."""
    slots = [slot for slot in indices.unique().tolist() if slot >= 0]
    if len(slots) == 1 and bool((indices >= 0).all()):
        return [(slots[0], None)]
    return [(slot, (indices == slot).nonzero()[:, 0]) for slot in slots]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Add zeros up to a multiple of `_BLOCK` rows. x: (tokens, features)."""
    padded_rows = x.new_zeros(-(-len(x) // _BLOCK) * _BLOCK, x.shape[1])
    padded_rows[: len(x)] = x
    return padded_rows
