"""Recurrent layers on packed rows: gated delta nets, Mamba-2 mixers and short convolutions.

Attention respects rows by its mask or its kernel. A recurrent layer carries a state from token to token, and would
carry it from row to row: transformers' implementations in plain torch take a pack for one row, without an error, which
moves log-probabilities by 0.7 to 6 nats. Here their convolutions and scans, functions of the module that defines the
model, compute each row of a pack by itself. All else, the projections above all, is one call for the whole pack, so
ZeRO-3 gathers the same weights on all ranks however many rows each has.

On NVIDIA GPUs the kernels of causal-conv1d, flash-linear-attention and mamba-ssm take row boundaries themselves, and
the whole pack is one call, where they are installed.

Covered: Qwen3-Next, Qwen3.5, Falcon-H1, Nemotron-H, Granite 4 hybrids, Bamba, LFM2. Recurrent layers of other classes
are refused by `trainer/model/start_checks/isolation.py`. Not covered: shared prefixes, whose state would have to be
handed on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.trainer.batch.packing import PackedBatch

LAYERS = ("GatedDeltaNet", "Mixer", "MambaLayer", "ShortConv")
"""Ends of the names of recurrent layers' classes in transformers."""


class _Sequential(NamedTuple):
    """A function of transformers that passes a state from token to token."""

    package: str
    """Package of its kernel, which takes row boundaries."""
    dim: int
    """Dimension of tokens, in its arguments and its output."""
    arguments: tuple[int | str, ...]
    """Positions and names of the arguments with that dimension."""


FUNCTIONS = {
    "causal_conv1d_fn": _Sequential("causal_conv1d", 2, (0,)),
    "torch_chunk_gated_delta_rule": _Sequential("fla", 1, (0, 1, 2, "g", "beta")),
    "mamba2_chunk_scan": _Sequential("mamba_ssm", 1, (0, 1, 3, 4)),
}
"""By their names in the modules of transformers' models. In the other forms of these functions either a kernel takes
row boundaries, or a cache is used, which the trainer does not have."""


_row_lengths = WeakTensorKeyDictionary()
"""Lengths of the rows of each `seq_idx` in use: from the tensor, every function of every layer would wait for them."""


def isolate_rows(model: nn.Module) -> None:
    """Let the recurrent layers of this model, and of others of its module, respect the rows of a pack; idempotent."""
    for layer in recurrent_layers(model):
        if "time_step_limit" in vars(layer):
            vars(layer)["time_step_limit"] = time_step_limit(model)
    for module in {sys.modules[type(layer).__module__] for layer in recurrent_layers(model)}:
        for name, sequential in FUNCTIONS.items():
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "by_row"):
                setattr(module, name, _row_by_row(function, sequential))


def time_step_limit(model: Any) -> tuple[float, ...]:
    """Return the limits of a model's time steps.

    transformers limits those of Nemotron-H and Zamba2 from below by `time_step_min`, which is for initial values only.
    """
    return tuple(getattr(model.config.get_text_config(), "time_step_limit", None) or (0.0, float("inf")))


def recurrent_layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module).__name__.endswith(LAYERS))


def row_arguments(packed: PackedBatch) -> dict[str, torch.Tensor]:
    """Return the arguments of a decoder by which its recurrent layers know the rows of a pack.

    seq_idx: (1, L) int32 row of each token. cu_seq_lens_q: as `PackedBatch.cu_seqlens`.
    """
    lengths = packed.cu_seqlens.diff()
    rows = torch.arange(packed.num_rows, dtype=torch.int32, device=lengths.device)
    seq_idx = rows.repeat_interleave(lengths, output_size=packed.num_tokens)[None]
    _row_lengths[seq_idx] = packed.row_lengths
    return {"seq_idx": seq_idx, "cu_seq_lens_q": packed.cu_seqlens}


def _row_by_row(function: Callable[..., Any], sequential: _Sequential) -> Callable[..., Any]:
    @functools.wraps(function)
    def compute(*args: Any, seq_idx: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if seq_idx is None:
            return function(*args, **kwargs)
        if args[0].is_cuda and find_spec(sequential.package) is not None:
            return function(*args, seq_idx=seq_idx, **kwargs)
        lengths = list(_row_lengths[seq_idx])
        arguments = {**dict(enumerate(args)), **kwargs}
        parts = {name: arguments[name].split(lengths, sequential.dim) for name in sequential.arguments}
        outputs = []
        for row in range(len(lengths)):
            own = {name: parts[name][row] if name in parts else value for name, value in arguments.items()}
            keywords = {name: value for name, value in own.items() if isinstance(name, str) and name != "cu_seqlens"}
            outputs.append(function(*(own[position] for position in range(len(args))), **keywords))
        if isinstance(outputs[0], tuple):  # with the last state, which is None without a cache
            return torch.cat([output for output, _ in outputs], sequential.dim), None
        return torch.cat(outputs, sequential.dim)

    compute.by_row = True  # type: ignore[attr-defined]
    return compute
