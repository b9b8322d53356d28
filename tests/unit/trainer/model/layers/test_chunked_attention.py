"""Chunks of positions and queries scaled by position (Llama 4), against a mask over each whole row in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.batch.packing import PackedBatch
from lockstep.trainer.model.layers import packed_attention, varlen_attention
from lockstep.trainer.model.layers.chunked_attention import QueryScale, adapt, chunks
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES
from tests.unit.trainer.model.layers.test_varlen_attention import kernel, pack

SCALE = QueryScale(slope=0.5, interval=16)


def by_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedBatch, size: int) -> torch.Tensor:
    """Compute the attention of each row with its whole prefix, under a mask of chunks."""
    starts = [0, *packed.cu_seqlens.tolist()[1:]]
    outputs = []
    for row, length in enumerate(packed.row_lengths):
        prefix = packed.prefixes[row] if packed.prefixes else ()
        spans = [*((starts[earlier], shared) for earlier, shared in prefix), (starts[row], length)]
        index = torch.cat([torch.arange(start, start + count) for start, count in spans])
        positions = torch.arange(len(index))
        own = positions[-length:]
        queries = q[0, :, index[-length:]] * (torch.log(1 + torch.floor((own + 1) / 16)) * 0.5 + 1)[:, None].double()
        seen = (positions <= own[:, None]) & (positions // size == own[:, None] // size)
        scores = queries @ k[0, :, index].transpose(1, 2) * q.shape[-1] ** -0.5
        outputs.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[0, :, index])
    return torch.cat(outputs, 1).transpose(0, 1)[None]


@pytest.mark.parametrize("is_kernel", [False, True], ids=["calls per row", "kernel"])
@pytest.mark.parametrize("share_prefixes", [False, True], ids=["whole rows", "shared prefixes"])
@pytest.mark.parametrize("size", [1, 7, 32, 40, 45, 70, 1000])
def test_a_token_sees_its_chunk_up_to_itself(
    monkeypatch: pytest.MonkeyPatch, is_kernel: bool, share_prefixes: bool, size: int
) -> None:
    monkeypatch.setattr(varlen_attention, "can_compute", lambda query, value: is_kernel)
    monkeypatch.setattr(varlen_attention, "varlen_attn", kernel)
    packed = pack(share_prefixes=share_prefixes)
    assert (packed.prefixes is not None) == share_prefixes
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, packed.num_tokens, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    found, _ = packed_attention.packed_rows_attention(
        torch.nn.Module(), q, k, v, None, packed=packed, chunk_size=size, query_scale=SCALE
    )
    expected = by_mask(q, k, v, packed, size)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)  # the scale is float32
    grad = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    for mine, reference in zip(*(torch.autograd.grad(one, (q, k, v), grad) for one in (found, expected)), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-7)


def test_pieces_hold_all_tokens_once_and_are_cut_once_per_pack() -> None:
    packed = pack(share_prefixes=True)
    cut = chunks(packed, 32)
    assert cut is chunks(packed, 32)
    assert sum(cut.row_lengths) == packed.num_tokens
    assert cut.cu_seqlens.diff().tolist() == list(cut.row_lengths)
    assert max(cut.row_lengths) <= 32
    assert cut.prefixes is not None
    pieces = zip(cut.row_lengths, cut.prefixes, strict=True)
    assert all(length + sum(shared for _, shared in prefix) <= 32 for length, prefix in pieces)


def llama4(**changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = FAMILIES["llama4"]()
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


def test_an_adapted_model_computes_plain_batches_as_before() -> None:
    ids = torch.randint(1, 500, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = llama4()(ids).logits
        policy = Policy(llama4())
        adapt(policy.causal_lm)  # again
        found = policy.causal_lm(ids).logits
        unscaled = Policy(llama4(attn_temperature_tuning=False)).causal_lm(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (unscaled - expected).abs().max() > 0.01


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_counts_from_the_first_row_is_refused(attention: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"attn_implementation={attention}: .* set model\.attn_implementation=packed"
    ):
        Policy(llama4(), attn_implementation=attention)
