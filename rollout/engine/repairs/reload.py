"""Repairs of vLLM's layerwise reload, for loaders that it does not expect.

During a reload, parameters lie on the meta device, and their `weight_loader`s collect what is loaded until a layer is
complete. A loader that copies directly, as vLLM's gpt-oss does with experts and attention sinks, copies into nothing:
it reports the parameter as loaded, and the layer keeps its old values. Here such parameters are found by that
contradiction, given memory, and loaded once more; then the reload processes their layers like any other.

The reload also reads the `__name__` of every `weight_loader`, which a `functools.partial` lacks (norms of MiniMax-M2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]


def install() -> None:
    """Let `initialize_layerwise_reload` repair the model's loaders; may be called repeatedly.

    All weight transfers begin with that function, and import it when they do.
    """
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload import layerwise

    def initialize(model: nn.Module) -> None:
        _name_loaders(model)
        layerwise.initialize_layerwise_reload(model)
        _repair_loading(model)

    reload.initialize_layerwise_reload = initialize


def _name_loaders(model: nn.Module) -> None:
    for param in model.parameters():
        loader = getattr(param, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _repair_loading(model: nn.Module) -> None:
    if "load_weights" in model.__dict__:
        return
    load_once = cast(Callable[[Weights], set[str] | None], model.load_weights)

    def load_weights(weights: Weights) -> set[str] | None:
        """Load weights, twice if parameters were bypassed; an iterator is read whole first."""
        again = list(weights) if isinstance(weights, Iterator) else weights
        loaded_names = load_once(again)
        bypassed_names = _bypassed(model, loaded_names or ())
        if bypassed_names:
            _materialize(model, bypassed_names)
            with _loading_only(model, bypassed_names):
                load_once(again)
            _process_complete(model, bypassed_names)
        return loaded_names

    model.__dict__["load_weights"] = load_weights


def _bypassed(model: nn.Module, loaded: Collection[str]) -> list[str]:
    """Return the parameters that were reported as loaded and are on the meta device with nothing collected."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    def is_collected(name: str) -> bool:
        owner, _, leaf = name.rpartition(".")
        return any(leaf == one for one, _ in get_layerwise_info(model.get_submodule(owner)).loaded_weights)

    return [name for name, p in model.named_parameters() if p.is_meta and name in loaded and not is_collected(name)]


def _materialize(model: nn.Module, names: Collection[str]) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    for name in names:
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        info = get_layerwise_info(layer)
        with info.restore_device:
            setattr(layer, leaf, materialize_meta_tensor(layer.get_parameter(leaf)))
        info.load_numel += get_tensor_load_numel(layer.get_parameter(leaf))


@contextmanager
def _loading_only(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let all other parameters ignore what is loaded: they have it, some of them in a layout of their kernels."""
    others = [(p, getattr(p, "weight_loader", None)) for name, p in model.named_parameters() if name not in names]
    for param, _ in others:
        param.weight_loader = _ignore  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for param, loader in others:
            if loader is None:
                del param.weight_loader  # type: ignore[attr-defined]
            else:
                param.weight_loader = loader  # type: ignore[attr-defined]


def _ignore(*_: object, **__: object) -> bool:
    return True  # of `return_success`


def _process_complete(model: nn.Module, names: Collection[str]) -> None:
    """Process the layers that are complete, as the last `weight_loader` would; the end of the reload does the rest."""
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

    for layer in {model.get_submodule(name.rpartition(".")[0]) for name in names}:
        info = get_layerwise_info(layer)
        if info.load_numel >= (info.load_numel_total or 0):
            _layerwise_process(layer, info)
