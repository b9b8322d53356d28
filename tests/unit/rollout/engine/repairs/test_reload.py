"""vLLM's layerwise reload of loaders that copy directly. With an engine: test_model_families.py (gpt_oss)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from lockstep.rollout.engine.plugin import register
from lockstep.rollout.weights.cuda_ipc import CudaIpcWeightTransferEngine

Named = list[tuple[str, torch.Tensor]]


class Negated(QuantizeMethodBase):
    """A kernel whose weights are the negatives of the checkpoint's."""

    def create_weights(self, layer: nn.Module, *args: object, **kwargs: object) -> None: ...

    def apply(self, layer: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        raise AssertionError("never called")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for param in layer.parameters(recurse=False):
            param.data.neg_()


class Layer(nn.Module):
    def __init__(self, *names: str, is_processed: bool = True) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2, 3), requires_grad=False))
        if is_processed:
            self.quant_method = Negated()


class Model(nn.Module):
    """Copies parameters named `direct...` itself, as vLLM's gpt-oss does with experts and sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Layer("weight")
        self.experts = Layer("direct_w13", "direct_w2")
        self.mixed = Layer("direct_w13", "bias")
        self.attention = Layer("direct_sinks", is_processed=False)
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.loads += 1
        params, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            if ".direct" in name:
                params[name].data.copy_(weight)
            else:
                getattr(params[name], "weight_loader", default_weight_loader)(params[name], weight)
            loaded.add(name)
        return loaded


def loaded_model() -> Model:
    register()
    model = Model()
    reload.record_metadata_for_reloading(model)
    return model


def new_weights(model: nn.Module, seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(param.shape, generator=generator)) for name, param in model.named_parameters()]


def update(model: Model, chunks: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> None:
    reload.initialize_layerwise_reload(model)
    for chunk in chunks:
        model.load_weights(chunk)
    reload.finalize_layerwise_reload(model, None)


def check(model: Model, weights: Named) -> None:
    params = dict(model.named_parameters())
    for name, weight in weights:
        assert torch.equal(params[name], weight if "attention" in name else -weight), name


def whole(weights: Named) -> list[Named]:
    return [weights]


def one_by_one(weights: Named) -> list[Named]:
    """Buckets of a transport that streams."""
    return [[one] for one in weights]


def as_iterator(weights: Named) -> list[Iterator[tuple[str, torch.Tensor]]]:
    return [iter(weights)]


@pytest.mark.parametrize("chunks", [whole, one_by_one, as_iterator])
def test_directly_copied_parameters_arrive_in_every_update(chunks: object) -> None:
    model = loaded_model()
    held = dict(model.named_parameters())
    for seed in (1, 2):
        weights = new_weights(model, seed)
        update(model, chunks(weights))  # type: ignore[operator]
        check(model, weights)
    assert {name: id(param) for name, param in model.named_parameters()} == {n: id(p) for n, p in held.items()}, (
        "kernels and CUDA graphs refer to the parameters of the first loading"
    )


def test_other_models_are_loaded_once() -> None:
    model = loaded_model()
    del model.experts, model.mixed, model.attention
    weights = new_weights(model, 1)
    update(model, [weights])
    check(model, weights)
    assert model.loads == 1


def test_partial_functions_are_loaders() -> None:
    def scaled(param: nn.Parameter, weight: torch.Tensor, *, scale: float) -> None:
        param.data.copy_(scale * weight)

    model = loaded_model()
    model.linear.weight.weight_loader = functools.partial(scaled, scale=2.0)  # type: ignore[attr-defined]
    reload.record_metadata_for_reloading(model)
    for seed in (1, 2):
        weights = new_weights(model, seed)
        update(model, [weights])
        check(model, [(name, 2 * tensor if "linear" in name else tensor) for name, tensor in weights])


def test_parameters_that_are_not_sent_keep_their_values() -> None:
    model = loaded_model()
    first = new_weights(model, 1)
    update(model, [first])
    update(model, [[(name, tensor) for name, tensor in new_weights(model, 2) if "mixed" in name]])
    check(model, [(name, tensor) for name, tensor in first if "mixed" not in name])


@pytest.mark.parametrize("transport", [NCCLWeightTransferEngine, CudaIpcWeightTransferEngine])
def test_transports_that_stream_to_gpus_begin_with_the_repair(transport: type[WeightTransferEngine]) -> None:
    model = loaded_model()
    engine = transport.__new__(transport)
    engine.model, engine.model_config = model, None  # type: ignore[assignment]
    engine._packed_importer = SimpleNamespace(close=lambda: None)  # type: ignore[attr-defined]
    weights = new_weights(model, 1)
    engine.start_weight_update()
    for chunk in one_by_one(weights):
        engine.model.load_weights(chunk)
    engine.finish_weight_update()
    check(model, weights)
