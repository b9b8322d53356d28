"""One kernel per layer on a GPU: what it is asked for, with the kernel replaced by its definition on CPU."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import EngineCall, FinishReason, VersionSpan
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.model.layers import packed_attention, varlen_attention
from lockstep.trainer.model.layers.varlen_attention import key_layout
from lockstep.trainer.model.policy import Policy
from tests.fixtures.families import FAMILIES

PROMPT, HISTORY = tuple(range(10, 50)), tuple(range(60, 90))
NUM_SAMPLED = 16
ROWS = [
    (*PROMPT, *HISTORY, 5, 6, 7, *range(90, 90 + NUM_SAMPLED)),
    (*PROMPT, *HISTORY, 8, *range(92, 92 + NUM_SAMPLED)),
    (*PROMPT, 9, 11, 12, 13, *range(94, 94 + NUM_SAMPLED)),
    tuple(range(100, 101 + NUM_SAMPLED)),
]


def pack(*, share_prefixes: bool) -> PackedBatch:
    rows = []
    for number, ids in enumerate(ROWS):
        call = EngineCall(
            prompt_ids=ids[:-NUM_SAMPLED],
            sampled_ids=ids[-NUM_SAMPLED:],
            sampled_logprobs=(-1.0,) * NUM_SAMPLED,
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=NUM_SAMPLED),),
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
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    assert query.dtype == key.dtype == value.dtype
    group, dtype = query.shape[1] // key.shape[1], query.dtype
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
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
    return torch.cat(outputs).to(dtype)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the kernel: tokens of the pack, dtype and width of the heads."""

    tokens: int
    dtype: torch.dtype
    width: int


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Answer the question for the device with yes, and record the kernel's calls."""
    made: list[Call] = []

    def recorded(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(Call(len(query), query.dtype, query.shape[-1]))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(varlen_attention, "has_kernel", lambda device: True)
    monkeypatch.setattr(varlen_attention, "varlen_attn", recorded)
    return made


@pytest.mark.parametrize("share_prefixes", [False, True], ids=["whole rows", "shared prefixes"])
@pytest.mark.parametrize("window", [None, 1, 7, 45, 1000])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_kernel_and_the_calls_per_row_give_the_same(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch, share_prefixes: bool, window: int | None, kv_heads: int,
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

    monkeypatch.setattr(varlen_attention, "can_compute", lambda query, value: True)  # also in float64
    by_kernel = attended()
    assert [call.tokens for call in calls] == [packed.num_tokens]
    monkeypatch.setattr(varlen_attention, "can_compute", lambda query, value: False)
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


SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
PRECISIONS = ("bfloat16 weights", "float16 weights", "autocast")


def scored(policy: Policy, packed: PackedBatch, precision: str) -> torch.Tensor:
    """Return the logprobs as in one of `PRECISIONS`; `policy` has float32 weights."""
    weights = {"bfloat16 weights": torch.bfloat16, "float16 weights": torch.float16}.get(precision, torch.float32)
    made = copy.deepcopy(policy).to(weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"), torch.no_grad():
        return made(packed)[0]


def assert_kernel_is_called_in_every_layer(
    policy: Policy, calls: list[Call], precision: str, *, share_prefixes: bool, width: int
) -> None:
    packed = pack(share_prefixes=share_prefixes)
    calls.clear()  # of the check of its head
    by_kernel = scored(policy, packed, precision)
    dtype = torch.float16 if precision == "float16 weights" else torch.bfloat16
    assert calls == [Call(packed.num_tokens, dtype, width)] * 2
    with pytest.MonkeyPatch.context() as without:
        without.setattr(varlen_attention, "has_kernel", lambda device: False)
        by_row = scored(policy, packed, precision)
    assert len(calls) == 2
    exact = scored(policy, pack(share_prefixes=share_prefixes), "float32")
    floor = float((by_row - exact).abs().mean())
    assert float((by_kernel - exact).abs().mean()) < 2 * floor, "the two paths round alike"


@pytest.mark.parametrize("share_prefixes", [False, True], ids=["whole rows", "shared prefixes"])
@pytest.mark.parametrize("window", [None, 9, 50], ids=["full", "shorter than the queries", "longer"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_in_half_precision_calls_the_kernel_once_per_layer(
    calls: list[Call], share_prefixes: bool, window: int | None, width: int, precision: str
) -> None:
    """Under autocast, too, where the norms of queries and keys and the rotation give float32."""
    torch.manual_seed(0)
    windowed = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    policy = Policy(
        AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=width, **(windowed if window else {})))
    )
    assert_kernel_is_called_in_every_layer(policy, calls, precision, share_prefixes=share_prefixes, width=width)


WIDTHS = {"llama3": 32, "gemma3": 32, "phi3": 32, "mistral": 32, "deepseek_v3": 96, "qwen3_moe": 32}
"""Widths of heads that the kernel is given; DeepSeek's values are narrower than its queries, and padded."""


@pytest.mark.parametrize("family", WIDTHS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_families_call_the_kernel_in_half_precision(calls: list[Call], family: str, precision: str) -> None:
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(FAMILIES[family]()))
    assert_kernel_is_called_in_every_layer(policy, calls, precision, share_prefixes=True, width=WIDTHS[family])


@pytest.mark.parametrize(("width", "called"), [(12, 16), (256, 256), (264, None)])
def test_heads_are_padded_to_widths_that_the_kernel_takes_and_wider_ones_go_without(
    calls: list[Call], width: int, called: int | None
) -> None:
    packed = pack(share_prefixes=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, packed.num_tokens, width, generator=generator).bfloat16() for _ in range(3))
    output, _ = packed_attention.packed_rows_attention(torch.nn.Module(), q, k, v, None, packed=packed)
    assert calls == ([] if called is None else [Call(packed.num_tokens, torch.bfloat16, called)])
    q, k, v = q.float(), k.float(), v.float()
    exact, _ = packed_attention.packed_rows_attention(torch.nn.Module(), q, k, v, None, packed=packed)
    torch.testing.assert_close(output.float(), exact, rtol=0.05, atol=0.03)


def test_float32_and_float64_compute_without_the_kernel(calls: list[Call]) -> None:
    policy = Policy(AutoModelForCausalLM.from_config(FAMILIES["qwen3"]()))
    policy(pack(share_prefixes=True))
    with torch.autocast("cpu", torch.bfloat16):
        policy.double()(pack(share_prefixes=True))
    assert not calls


def test_the_kernel_is_for_half_precision_on_a_gpu() -> None:
    states = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    assert not varlen_attention.can_compute(states, states)


def test_a_row_alone_sees_its_own_tokens_only(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "can_compute", lambda query, value: True)
    packed = pack(share_prefixes=False)
    starts = np.cumsum([0, *packed.row_lengths])
    k = torch.randn(1, 2, packed.num_tokens, 8)
    v = k.clone()
    v[:, :, starts[1] :] = torch.nan
    output, _ = packed_attention.packed_rows_attention(torch.nn.Module(), k, k, v, None, packed=packed)
    assert output[:, : starts[1]].isfinite().all()
