"""Routing replay: a mixture of experts computes with given experts in place of its routers' own choice.

Engine and trainer round differently, so a router near a tie chooses other experts in each of them, and the logprobs of
a token differ by far more than rounding. With the experts that the engine chose (R3, Ma et al. 2025, arXiv 2510.11370),
or that the trainer chose before the update (R2, Zheng et al. 2025, arXiv 2507.18071), they agree again.

Every router of transformers ends in one `torch.topk` over all experts. Inside a sparse block that call returns the
given indices, with the values found there. All else is the family's own arithmetic: softmax before or after the choice,
sigmoid scores, correction biases, normalization, scale. So the weights of the given experts have their gradient
through the gate.

    packed.routes (L, layers, k) ─► layer i, which takes `packed` ─► its sparse block: topk ─► given experts

A layer reads the routes from its own arguments, which gradient checkpointing keeps for the backward pass. A token
without a route (-1) gets the model's own choice.

Covered: sparse blocks with a child named `experts`, with ZeRO-3, DDP, LoRA, gradient checkpointing and compiled layers,
whose sparse blocks are not compiled. Not covered: attention other than `packed_rows`, whose layers are not given
`packed`.

Shape legend: _L tokens of the pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from lockstep.rollout.errors import ConfigError, TrainingError
from lockstep.trainer.batch.packing import NO_ROUTE, PackedBatch
from lockstep.trainer.config.groups.model_settings import ModelConfig
from lockstep.trainer.model.decoder import packable_config
from lockstep.trainer.model.layers.experts import EXPERTS

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of routed experts in configs."""


NARROW = 256
"""Largest number of experts whose indices fit one byte."""


def num_experts(config: PreTrainedConfig) -> int:
    """Return the number of routed experts of a layer; 0 for a dense model."""
    text = config.get_text_config().to_dict()
    return next((int(text[name]) for name in NUM_EXPERTS if text.get(name)), 0)


def refuse_dense(model: ModelConfig, replay: str) -> None:
    """Raise `ConfigError` if routes shall be replayed in a model without routers. replay: the setting."""
    if replay != "off" and not num_experts(
        packable_config(
            model.path,
            setting="model.path",
            trust_remote_code=model.trust_remote_code,
            has_adapters=model.lora.rank > 0,
        )
    ):
        raise ConfigError(
            f"correction.routing_replay={replay} needs a mixture of experts, but model.path={model.path} is a dense "
            "model; set correction.routing_replay=off"
        )


class Routing:
    """Routers of a model, which take the experts in `PackedBatch.routes` if there are any."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: a causal language model, changed in place. A dense model stays as it is."""
        experts = num_experts(model.config)
        layers = model.get_decoder().get_submodule("layers") if experts else nn.ModuleList()
        assert isinstance(layers, nn.ModuleList)
        self._num_layers = len(layers)
        self._routers: dict[int, _Router] = {}
        self._dtype = torch.uint8 if experts <= NARROW else torch.int16
        for index, layer in enumerate(layers):
            block = next((part for part in layer.modules() if EXPERTS in dict(part.named_children())), None)
            if block is not None:
                self._routers[index] = _Router(layer, block, index=index, num_layers=len(layers), num_experts=experts)

    def check_given(self, packed: PackedBatch) -> None:
        """Raise `TrainingError` unless every router has taken the routes of the pack that was just computed."""
        if packed.routes is not None and not (
            self._routers and all(router.given is not None for router in self._routers.values())
        ):
            raise TrainingError(
                "the layers of this model were not given the routes of their pack: it is a dense model, or hands its "
                "layers no `packed` (attention other than packed_rows); set correction.routing_replay=off"
            )

    def flipped(self, positions_T: Tensor) -> Tensor:
        """Return (T,) shares of the layers with experts in which the router itself would have chosen other experts.

        Of the last forward pass, whose routers were given experts: each saw states that the given experts of the layers
        before it had computed. Order does not count, and a token without a route is not flipped.

        positions_T: positions of the pack. Raises `TrainingError` if there are any, and no routes were given.
        """
        layer_flips = [router.flipped for router in self._routers.values() if router.flipped is not None]
        if len(layer_flips) < len(self._routers) or not layer_flips:
            if len(positions_T):
                raise TrainingError("routes shall be replayed, and the rows of a pack have none")
            return torch.zeros(0, device=positions_T.device)  # the pack of a rank without rows
        return torch.stack([flipped_L[positions_T] for flipped_L in layer_flips]).float().mean(0)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Record the experts of a forward pass inside; yield a function that returns them, (L, layers, k) integers."""
        for router in self._routers.values():
            router.is_recording = True
        try:
            yield self._last_experts
        finally:
            for router in self._routers.values():
                router.is_recording, router.chosen = False, None

    def _last_experts(self) -> Tensor:
        """Return the (L, layers, k) experts of the last forward pass, 0 in dense layers."""
        experts = {index: router.chosen for index, router in self._routers.items() if router.chosen is not None}
        assert experts, "a dense model has no routes"
        dense = torch.zeros_like(next(iter(experts.values())))
        return torch.stack([experts.get(index, dense) for index in range(self._num_layers)], 1).to(self._dtype)


class _Router:
    """Choice of experts in one layer."""

    def __init__(self, layer: nn.Module, block: nn.Module, *, index: int, num_layers: int, num_experts: int) -> None:
        self.is_recording = False
        self.chosen: Tensor | None = None
        """(L, k) experts of the last forward pass, if recorded."""
        self._index, self._num_layers, self._num_experts = index, num_layers, num_experts
        self.given: Tensor | None = None
        """(L, k) experts to choose in this pass."""
        self.flipped: Tensor | None = None
        """(L,) bool, True for tokens of the last forward pass for which the router would not choose the given set."""
        self._block = type(block).__name__
        self._forward = block.forward
        layer.register_forward_pre_hook(self._take, with_kwargs=True)
        block.forward = self._routed

    def _take(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take this layer's routes from its arguments, also when gradient checkpointing repeats the layer."""
        packed = kwargs.get("packed")
        routes = None if packed is None else packed.routes
        if routes is not None and routes.shape[1] != self._num_layers:
            raise TrainingError(f"routes of {routes.shape[1]} layers, but the model has {self._num_layers}")
        self.given = None if routes is None else routes[:, self._index]
        self.flipped = None

    def _routed(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is None and not self.is_recording:
            return self._forward(*args, **kwargs)
        experts = None if self.given is None else self.given.long()  # not kept: four times the bytes of the pack's
        choice = _Choice(experts, num_experts=self._num_experts)
        with choice:
            output = self._forward(*args, **kwargs)
        if choice.num_calls != 1:
            raise TrainingError(
                f"{self._block} chose among its {self._num_experts} experts in {choice.num_calls} calls of torch.topk, "
                "expected 1, so its routes cannot be replayed; set correction.routing_replay=off"
            )
        self.flipped = choice.flipped
        if self.is_recording:
            self.chosen = choice.chosen
        return output


class _Choice(TorchFunctionMode):
    """Calls of `topk` over all experts, which return the given ones."""

    def __init__(self, given: Tensor | None, *, num_experts: int) -> None:
        super().__init__()
        self.num_calls = 0
        self.chosen: Tensor | None = None
        self.flipped: Tensor | None = None
        self._given = given
        self._num_experts = num_experts

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        is_topk = func is torch.topk or func is torch.Tensor.topk
        # The choice of groups of experts (DeepSeek-V3, GLM-4) has another width, or one dimension more.
        if not is_topk or args[0].dim() != 2 or args[0].shape[1] != self._num_experts:
            return output
        self.num_calls += 1
        scores, own = args[0], output[1]
        if self._given is not None:
            if self._given.shape != own.shape:
                raise TrainingError(
                    f"routes of {tuple(self._given.shape)} (tokens, experts per token) for a router that chooses "
                    f"{tuple(own.shape)}: they are of another model"
                )
            router, own = own, torch.where(self._given == NO_ROUTE, own, self._given)
            self.flipped = (router[:, :, None] != own[:, None, :]).all(2).any(1)
            output = torch.return_types.topk((scores.gather(1, own), own))
        self.chosen = own.detach()
        return output
