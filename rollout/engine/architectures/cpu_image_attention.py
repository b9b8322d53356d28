"""Gemma 3 with the attention of the tokens of an image to all of it, also on a CPU.

vLLM hands each backend the ranges of images (`mm_req_doc_ranges`), and its CPU backend leaves them out without an
error: the tokens of an image attend only to those before them, as text. The logprobs of a tiny Gemma 3 were wrong by
0.13 to 0.16 at sampled tokens and by up to 0.66 in a prompt; with the repair the difference is 2e-6. It computes these
queries again, by torch.

Only for prompts that are computed whole in one step, as Lockstep's CPU engines do for this model: without chunks and
without cached prefixes (`rollout/engine/arguments.py`). Registered with vLLM as the module of the model, so that other
engines do not load it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.model_executor.models.gemma3_mm import Gemma3ForConditionalGeneration
from vllm.platforms import current_platform

__all__ = ["Gemma3ForConditionalGeneration"]


def _repair() -> None:
    from vllm.v1.attention.backends import cpu_attn

    build, forward = cpu_attn.CPUAttentionMetadataBuilder.build, cpu_attn.CPUAttentionBackendImpl.forward

    @functools.wraps(build)
    def with_ranges(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata: Any = build(self, common_prefix_len, common_attn_metadata, fast_build)
        metadata.images = images_of(common_attn_metadata)
        return metadata

    @functools.wraps(forward)
    def with_images(
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        result = forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *rest, **options)
        for first, start, end in getattr(attn_metadata, "images", ()):
            output[start:end] = attend(
                query[start:end], key[first:end], value[first:end], scale=self.scale, window=self.sliding_window
            ).view_as(output[start:end])
        return result

    cpu_attn.CPUAttentionMetadataBuilder.build = with_ranges
    cpu_attn.CPUAttentionBackendImpl.forward = with_images


def images_of(metadata: Any) -> list[tuple[int, int, int]]:
    """Return for each image that is computed in this step: the places in the batch of the first token of its prompt and
    of its own first token, and the end. Raises RuntimeError for a prompt in parts."""
    places = []
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for request, ranges in (metadata.mm_req_doc_ranges or {}).items():
        first = starts[request]
        computed = lengths[request] - (starts[request + 1] - first)
        for start, last in ranges:
            if last < computed:
                continue  # in the cache
            if computed:
                raise RuntimeError(f"an image of a prompt whose first {computed} tokens were computed before")
            places.append((first, first + start, first + last + 1))
    return places


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int) -> torch.Tensor:
    """Return the (tokens, heads, size) attention of the last tokens to all tokens within the window; below 0: to all.

    query: (tokens, heads, size). key, value: (tokens, heads of keys, size) of the prompt up to the last token.
    """
    places = torch.arange(len(key))
    sees = places[None] > places[-len(query) :, None] - (window if window > 0 else len(key))
    heads_first = (part.transpose(0, 1)[None] for part in (query, key, value))
    return scaled_dot_product_attention(*heads_first, attn_mask=sees, scale=scale, enable_gqa=True)[0].transpose(0, 1)


if current_platform.is_cpu():
    _repair()
