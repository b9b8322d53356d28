"""Passes of a decoder layer over its hidden states, by torch's operations and by compiled graphs (`model.compile`).

    python benchmarks/layer.py [--tokens 512] [--json]

A pass reads or writes as many bytes as the hidden states in bfloat16: tokens x hidden size x 2. Counted are norms,
rotary embedding, activation, residuals and casts of a layer of transformers with the shape ratios of Qwen3-1.7B and
Llama-3.2-1B, forward and backward: for torch's operations by a dispatch mode, for compiled graphs by the buffers of
their kernels, as Inductor's scheduler plans them. Not counted are matrix products, which both sides do alike, and
attention, which is one kernel outside of the compiled graphs.

No GPU is needed: numbers of passes do not depend on it, but for what Inductor fuses differently there. "saved" is the
memory of what the backward pass keeps, products and attention included, in hidden states of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from harness.passes import Passes, counted_operations
from harness.results import Row, argument_parser, report
from torch import nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from transformers import AttentionInterface, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

OURS = ("attention", "attention_backward")
"""Operations of the stand-in below."""
SHRINK = 8
"""Every width is this much smaller than the model's: passes are ratios."""


@torch.library.custom_op("layer_benchmark::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stand-in of the kernel: reads three tensors, writes one of the query's shape."""
    return query.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


@torch.library.custom_op("layer_benchmark::attention_backward", mutates_args=())
def attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@attention_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return attention_backward(gradient, *ctx.saved_tensors[:3])


attention.register_autograd(_backward, setup_context=_save)


def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    return attention(query, key, value), None


AttentionInterface.register("layer_benchmark", attend)


def models() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return a layer and its rotary embedding, by model."""
    common: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 8, "attn_implementation": "layer_benchmark"}
    qwen = Qwen3Config(
        hidden_size=2048 // SHRINK, intermediate_size=6144 // SHRINK, num_attention_heads=16 // SHRINK,
        num_key_value_heads=8 // SHRINK, head_dim=128, **common,
    )  # fmt: skip
    llama = LlamaConfig(
        hidden_size=2048 // SHRINK, intermediate_size=8192 // SHRINK, num_attention_heads=32 // SHRINK,
        num_key_value_heads=8 // SHRINK, head_dim=64, **common,
    )  # fmt: skip
    return {
        "Qwen3-1.7B": (Qwen3DecoderLayer(qwen, 0), Qwen3RotaryEmbedding(qwen)),
        "Llama-3.2-1B": (LlamaDecoderLayer(llama, 0), LlamaRotaryEmbedding(llama)),
    }


@contextmanager
def counted_graphs(unit: int) -> Iterator[Passes]:
    """Count the kernels that Inductor plans inside the block, products and attention apart."""
    passes = Passes(unit)
    compile_to_module = GraphLowering.compile_to_module

    def counted(graph: GraphLowering) -> Any:
        module = compile_to_module(graph)
        with V.set_graph_handler(graph):
            for node in graph.scheduler.nodes:
                if not node.is_extern():
                    kind = "backward" if graph.is_backward else "forward"
                    passes.bytes[kind] += node.get_read_write_buffers_sizes()
        return module

    with (
        mock.patch.object(GraphLowering, "compile_to_module", counted),
        config.patch(force_disable_caches=True),
    ):
        yield passes


def sides(layer: nn.Module, rotary: nn.Module, num_tokens: int) -> Iterator[Row]:
    """Yield a row for torch's operations and one for compiled graphs."""
    hidden_size = next(layer.parameters()).shape[-1]
    values = num_tokens * hidden_size
    hidden = torch.randn(1, num_tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    angles = rotary(hidden, torch.arange(num_tokens)[None])
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def forward(module: Callable[..., Any]) -> torch.Tensor:
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(hidden, position_embeddings=angles)
        return output[0] if isinstance(output, tuple) else output

    def row(side: str, passes: dict[str, float]) -> Row:
        both = {**passes, "both": sum(passes.values()), "saved": sum(sizes.values()) / 2 / values}
        return {"side": side, **{kind: round(number, 1) for kind, number in both.items()}}

    gradient = torch.ones_like(hidden)
    eager = {}
    with counted_operations(2 * values, tile=num_tokens * 32, besides=OURS) as passed:
        output = forward(layer)
        eager["forward"] = sum(passed.pop().values())
        output.backward(gradient)
        eager["backward"] = sum(passed.pop().values())
    yield row("operations", eager)
    torch._dynamo.reset()
    with counted_graphs(2 * values) as passed:
        output = forward(torch.compile(layer, dynamic=True))
        output.backward(gradient)
    yield row("compiled", passed.pop())


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    ratios = {}
    for name, (layer, rotary) in models().items():
        operations, compiled = sides(layer.to(torch.bfloat16), rotary, 128 if args.quick else args.tokens)
        rows += [{"layer of": name, **operations}, {"layer of": name, **compiled}]
        ratios[f"{name.partition('-')[0].lower()}_ratio"] = float(operations["both"]) / float(compiled["both"])  # type: ignore[arg-type]
    report("layer", rows, ratios, as_json=args.json)


if __name__ == "__main__":
    main()
