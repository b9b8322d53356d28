"""One kernel per layer on a GPU: what it is asked for, with the kernel replaced by its definition on CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall, FinishReason, VersionSpan
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.model.layers import packed_attention, varlen_attention
from lockstep.trainer.model.layers.varlen_attention import key_layout
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES

PROMPT, HISTORY = tuple(range(10, 50)), tuple(range(60, 90))
ROWS = [(*PROMPT, *HISTORY, 5, 6, 7), (*PROMPT, *HISTORY, 8), (*PROMPT, 9, 11, 12, 13), tuple(range(100, 117))]


def pack(*, share_prefixes: bool) -> PackedBatch:
    rows = []
    for number, ids in enumerate(ROWS):
        call = EngineCall(
            prompt_ids=ids[:-3] if number else ids[:-2],
            sampled_ids=ids[-3:] if number else ids[-2:],
            sampled_logprobs=(-1.0,) * (3 if number else 2),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=3 if number else 2),),
        )
        rows += rows_from_calls([call], rollout_id=number)
    return collate(rows, range(len(rows)), share_prefixes=share_prefixes)


def kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute what `varlen_attn` is defined to: causal from the last query and the last key of each row."""
    left, right = window_size
    assert right == 0
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q.diff().max(), cu_k.diff().max()) == (max_q, max_k)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    group = query.shape[1] // key.shape[1]
    outputs = []
    for row in range(len(cu_q) - 1):
        q = query[cu_q[row] : cu_q[row + 1]].transpose(0, 1)
        k, v = (
            states[cu_k[row] : cu_k[row + 1]].transpose(0, 1).repeat_interleave(group, 0) for states in (key, value)
        )
        distance = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        scores = (q @ k.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Answer the question for the device with yes, and count the kernel's calls."""
    made: list[int] = []

    def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(len(query))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(varlen_attention, "can_compute", lambda query: True)
    monkeypatch.setattr(varlen_attention, "varlen_attn", counted)
    return made


@pytest.mark.parametrize("share_prefixes", [False, True], ids=["whole rows", "shared prefixes"])
@pytest.mark.parametrize("window", [None, 1, 7, 45, 1000])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_kernel_and_the_calls_per_row_give_the_same(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, share_prefixes: bool, window: int | None, kv_heads: int,
    scaling: float | None,
) -> None:  # fmt: skip
    packed = pack(share_prefixes=share_prefixes)
    assert (packed.prefixes is not None) == share_prefixes
    generator = torch.Generator().manual_seed(0)

    def states(heads: int) -> torch.Tensor:
        shape = (1, heads, packed.num_tokens, 8)
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = states(4), states(kv_heads), states(kv_heads)
    grad = torch.randn((1, packed.num_tokens, 4, 8), dtype=torch.float64, generator=generator)

    def attended() -> tuple[torch.Tensor, ...]:
        output, _ = packed_attention.packed_rows_attention(
            torch.nn.Module(), q, k, v, None, packed=packed, scaling=scaling, sliding_window=window
        )
        return output, *torch.autograd.grad(output, (q, k, v), grad)

    by_kernel = attended()
    assert calls == [packed.num_tokens]
    monkeypatch.setattr(varlen_attention, "can_compute", lambda query: False)
    for found, expected in zip(by_kernel, attended(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert len(calls) == 1


def test_keys_are_laid_out_once_per_pack() -> None:
    packed = pack(share_prefixes=True)
    layout = key_layout(packed)
    assert layout is key_layout(packed)
    assert layout.index is not None
    lengths = layout.offsets.diff().tolist()
    assert layout.max_keys == max(lengths)
    ids = packed.ids[layout.index].split(lengths)
    found = sorted(tuple(row.tolist()) for row in ids)
    assert all(any(row == whole[: len(row)] for whole in ROWS) for row in found), "each row from its beginning"
    assert {whole for whole in ROWS if whole in found} == set(ROWS)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_model_calls_the_kernel_once_per_layer_and_scores_the_same(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(FAMILIES[family]()))
    packed = pack(share_prefixes=True)
    calls.clear()  # of the check of its head
    by_kernel, *_ = policy(packed, temperature=1.0)
    assert calls == [packed.num_tokens] * 2
    monkeypatch.setattr(varlen_attention, "can_compute", lambda query: False)
    torch.testing.assert_close(by_kernel, policy(packed, temperature=1.0)[0], rtol=1e-5, atol=1e-5)


def test_the_kernel_is_for_half_precision_on_a_gpu() -> None:
    assert not varlen_attention.can_compute(torch.zeros(1, dtype=torch.bfloat16))


def test_a_row_alone_sees_its_own_tokens_only(calls: list[int]) -> None:
    packed = pack(share_prefixes=False)
    starts = np.cumsum([0, *packed.row_lengths])
    k = torch.randn(1, 2, packed.num_tokens, 8)
    v = k.clone()
    v[:, :, starts[1] :] = torch.nan
    output, _ = packed_attention.packed_rows_attention(torch.nn.Module(), k, k, v, None, packed=packed)
    assert output[:, : starts[1]].isfinite().all()
