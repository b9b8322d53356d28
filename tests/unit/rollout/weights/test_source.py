"""Names, buckets, casts and merges of the weight source."""

from __future__ import annotations

from functools import cached_property

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta

from lockstep.rollout.errors import SyncError
from lockstep.rollout.weights.checkpoint_tensors import unwrap
from lockstep.rollout.weights.gloo.worker import bucket_layout, views
from lockstep.rollout.weights.shards import Fetch
from lockstep.rollout.weights.source import ZeroSource, nbytes, plan_buckets
from tests.fixtures.models import tiny_qwen3


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParamMeta:
    return ParamMeta(name, dtype, shape)


def test_a_bucket_never_spans_two_layers_or_exceeds_its_limit() -> None:
    metas = [meta("embed", 100, 4)]
    metas += [meta(f"layers.{layer}.{part}", 10, 4) for layer in (0, 1) for part in "abcd"]
    metas += [meta("norm", 4)]
    buckets = [[m.name for m in bucket] for bucket in plan_buckets(metas, 480)]

    assert buckets == [
        ["embed"],
        ["layers.0.a", "layers.0.b", "layers.0.c"],
        ["layers.0.d"],
        ["layers.1.a", "layers.1.b", "layers.1.c"],
        ["layers.1.d"],
        ["norm"],
    ]


def test_views_of_a_bucket_with_mixed_dtypes_do_not_overlap() -> None:
    metas = [meta("a", 3, dtype=torch.bfloat16), meta("b", dtype=torch.float64), meta("c", 5), meta("d", 0, 4)]
    offsets, size = bucket_layout(metas)
    tensors = dict(views(torch.zeros(size, dtype=torch.uint8), metas))
    for value, tensor in enumerate(tensors.values(), start=1):
        tensor.fill_(value)

    assert [t.flatten()[:1].tolist() for t in tensors.values()] == [[1], [2], [3], []]
    assert all(a + nbytes(m) <= b for a, b, m in zip(offsets, [*offsets[1:], size], metas, strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_yields_its_checkpoint_and_tied_weights_once(tied: bool) -> None:
    model = tiny_qwen3(tied=tied)
    source = ZeroSource(model)
    pairs = dict(source)

    assert set(pairs) == set(dict(model.named_parameters()))
    assert ("lm_head.weight" in pairs) is not tied
    assert [(m.name, m.shape, m.dtype) for m in source.metadata] == [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in source
    ]


def test_both_interfaces_of_vllms_weight_source_give_the_same() -> None:
    source = ZeroSource(tiny_qwen3(tied=True))

    # vLLM 0.32 calls a method and iterates over the source.
    assert source.metadata() == source.metadata
    # vLLM 0.33 refuses classes without a cached property, and reads sources by `iter_full`.
    assert isinstance(vars(ZeroSource)["metadata"], cached_property)
    assert source.metadata is source.metadata
    assert [name for name, _ in source.iter_full()] == [meta.name for meta in source.metadata] == list(dict(source))
    # Without owners every rank takes part in the gather.
    assert [getattr(meta, "owners", None) for meta in source.metadata] == [None] * len(source.metadata)


def test_sent_weights_are_cast_and_the_model_keeps_its_dtype() -> None:
    model = tiny_qwen3(tied=True)
    source = ZeroSource(model, dtype=torch.bfloat16)

    assert {tensor.dtype for _, tensor in source} == {torch.bfloat16} == {m.dtype for m in source.metadata}
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_every_pass_yields_the_current_weights() -> None:
    model = nn.Linear(2, 2, bias=False)
    source = ZeroSource(model)
    dict(source)
    with torch.no_grad():
        model.weight.fill_(7.0)

    assert (dict(source)["weight"] == 7.0).all()


def test_unwrap_returns_the_module_inside_torch_compile() -> None:
    model = nn.Linear(2, 2)

    assert unwrap(torch.compile(model)) is model


def test_an_adapter_is_merged_into_a_copy_under_the_names_of_the_base_model() -> None:
    base = tiny_qwen3(tied=True)
    names = [name for name, _ in base.named_parameters()]
    adapted = _with_lora(base, target_modules=["q_proj", "down_proj"])
    before = {name: param.clone() for name, param in adapted.named_parameters()}
    sent = dict(ZeroSource(adapted))
    assert sorted(sent) == sorted(names)
    assert all(torch.equal(before[name], param) for name, param in adapted.named_parameters())

    plain = tiny_qwen3(tied=True)
    plain.load_state_dict(sent, strict=False)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
        with adapted.disable_adapter():
            assert (plain(ids).logits - adapted(ids).logits).abs().max() > 0.1


def test_a_fully_trained_module_replaces_its_original() -> None:
    adapted = _with_lora(tiny_qwen3(tied=False), target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        adapted.base_model.model.lm_head.modules_to_save["default"].weight.fill_(3.0)
    sent = dict(ZeroSource(adapted))

    assert (sent["lm_head.weight"] == 3.0).all()
    assert sorted(sent) == sorted(name for name, _ in tiny_qwen3(tied=False).named_parameters())


def test_dora_and_adapters_on_tied_weights_are_refused() -> None:
    with pytest.raises(SyncError, match="use_dora=False"):
        ZeroSource(_with_lora(tiny_qwen3(tied=True), target_modules=["q_proj"], use_dora=True))
    with pytest.raises(SyncError, match="tied weights"):
        ZeroSource(_with_lora(tiny_qwen3(tied=True), target_modules=["embed_tokens"]))


def _with_lora(model: nn.Module, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **settings))
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:
                param.normal_(std=0.3)
    return adapted.eval()


def test_every_tensor_is_ordered_after_its_fetch_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered: list[int] = []
    monkeypatch.setattr(Fetch, "use", lambda self, values: ordered.extend(value.data_ptr() for value in values))
    for name, tensor in ZeroSource(tiny_qwen3(tied=True)):
        assert tensor.data_ptr() == ordered[-1], name
