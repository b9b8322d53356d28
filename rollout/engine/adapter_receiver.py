"""The policy's adapter on its way into an engine: staged during a weight transfer, checked, and kept for vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.rollout.engine.protocol import buffer_rank
from lockstep.rollout.vllm_names import check_vllm

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager

A, B = ".lora_A.weight", ".lora_B.weight"
UPDATE = "adapter update"

Pair = tuple[torch.Tensor, torch.Tensor]


class AdapterReceiver(nn.Module):
    """Takes the place of the model in a weight transfer, and keeps the policy's adapter for vLLM."""

    def __init__(self, manager: LoRAModelManager) -> None:
        super().__init__()
        check_vllm("adapters")
        self.manager = manager
        self._staged: dict[str, torch.Tensor] = {}
        self._kept: dict[str, Pair] = {}
        """A and scaled B, by the layer's name in vLLM."""

    @property
    def _dtype(self) -> torch.dtype:
        dtype = self.manager.lora_config.lora_dtype
        assert isinstance(dtype, torch.dtype), "vLLM has resolved auto"
        return dtype

    def begin(self) -> None:
        """Drop what a broken transfer has left."""
        self._staged = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stage tensors, in memory of their own: transfers reuse theirs."""
        dtype = self._dtype
        self._staged |= {name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in weights}
        return set()

    def finish(self) -> None:
        """Check the staged adapter and keep it. Raises `RuntimeError` with the old one in place."""
        staged_tensors, self._staged = self._staged, {}
        self._kept = self._checked(staged_tensors)

    def adapter(self, adapter_id: int) -> LoRAModel:
        """Return the adapter for vLLM, which changes what it gets."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        pairs = self._kept or self._zeros()  # vLLM fails for an adapter without layers
        layers = {name: LoRALayerWeights(name, len(a), len(a), a.clone(), b.clone()) for name, (a, b) in pairs.items()}
        rank = max(len(a) for a, _ in pairs.values())
        return LoRAModel(adapter_id, rank, layers)

    def check_loaded(self, name: str, loaded: LoRAModel) -> None:
        """Raise `RuntimeError` for an adapter from a directory that does not fit the model.

        vLLM leaves out layers that the model lacks, and dies of wrong shapes.
        """
        layers, max_rank = self._layers(), self.manager.lora_config.max_lora_rank
        for layer, weights in loaded.loras.items():
            if layer not in layers:
                raise RuntimeError(
                    f"adapter {name}: the model has no layer {layer} that can have an adapter; use adapters of this "
                    "model.path"
                )
            a, b = weights.lora_a, weights.lora_b
            _check_pair(layer, a, b, layers[layer], max_rank=max_rank, source=f"adapter {name}")

    def _zeros(self) -> dict[str, Pair]:
        """Return an adapter of one layer that changes nothing."""
        name, inputs = next(iter(self._layers().items()))
        dtype = self._dtype
        return {name: (torch.zeros(1, inputs or 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype))}

    def _checked(self, staged: Mapping[str, torch.Tensor]) -> dict[str, Pair]:
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        mapper = mapper and mapper.get_rename_mapper()
        layers = self._layers()
        pairs: dict[str, Pair] = {}
        for name, a in staged.items():
            if not name.endswith(A):
                if name.removesuffix(B) + A not in staged:
                    raise RuntimeError(f"{UPDATE}: expected LoRA tensors, found {name}")
                continue
            b = staged.get(name.removesuffix(A) + B)
            if b is None:
                raise RuntimeError(f"{UPDATE}: {name} came without its lora_B")
            # vLLM's mappers rename weights by their beginnings and parts, of which `.weight` may be one.
            weight_name = name.removesuffix(A) + ".weight"
            layer = ((mapper._map_name(weight_name) if mapper else weight_name) or "").removesuffix(".weight")
            if layer not in layers:
                raise RuntimeError(
                    f"{UPDATE}: vLLM's {type(self.manager.model).__name__} has no adapters on {layer or name}; "
                    "set model.lora.send=merged, or leave the layer out with model.lora.target_modules"
                )
            _check_pair(layer, a, b, layers[layer], max_rank=self.manager.lora_config.max_lora_rank)
            pairs[layer] = (a, b)
        if not pairs:
            raise RuntimeError(f"{UPDATE}: no tensors arrived")
        return pairs

    def _layers(self) -> dict[str, int | None]:
        """Return the layers that can have adapters, with the inputs of each if it is known."""
        sizes = {}
        for name, module in self.manager.modules.items():
            size = getattr(getattr(module, "base_layer", None), "input_size", None)
            sizes |= dict.fromkeys(self.manager.packed_modules.get(name, [name]), size)
        return sizes


def _check_pair(
    layer: str, a: torch.Tensor, b: torch.Tensor, inputs: int | None, *, max_rank: int, source: str = UPDATE
) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or inputs not in (None, a.shape[1]):
        raise RuntimeError(
            f"{source}: {layer} has {inputs} inputs, and its adapter came as {tuple(a.shape)} and {tuple(b.shape)}; "
            "use the same model.path for both sides"
        )
    if a.shape[0] > max_rank:
        raise RuntimeError(
            f"{source}: {layer} came with rank {a.shape[0]}, and the engine was started for {max_rank}; restart it "
            f"with --max-lora-rank {buffer_rank(a.shape[0])}"
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise RuntimeError(f"{source}: {layer} came with values that are not finite")
