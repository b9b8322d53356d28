"""Outputs of the routers of a mixture of experts, recorded during a forward pass.

transformers names each model's routers in `can_record_outputs`. Hooks on these modules see what they give to the
experts, under ZeRO-3 and LoRA too, and need no argument that the forward passes of all layers in between would have to
hand on. They record inside of `recorded()` only, so the second forward pass of gradient checkpointing is not recorded.

Covered: models of transformers that record `router_logits` and whose config has `num_experts_per_tok`. In all others
no router is found.

Shape legend: _L tokens of the pack, _E experts of a layer, _K chosen experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig


class RouterOutput(NamedTuple):
    """Output of one router for a pack."""

    chosen_LK: Tensor
    """int64 experts that compute the token."""
    num_experts: int
    logits_LE: Tensor | None
    """None unless asked for: with many layers they take more memory than the choices."""


class RouterOutputs:
    """Recorder of the routers of a decoder."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        """Register the hooks. Do it after `Distributed.prepare`, so that they see outputs as ZeRO-3 hands them on."""
        self._records: list[RouterOutput] | None = None
        self._keeps_logits = False
        decoder_routers = routers(decoder)
        self.num_routers = len(decoder_routers)
        for router, index in decoder_routers:
            router.register_forward_hook(self._hook(index, top_k(decoder)))

    @contextmanager
    def recorded(self, *, with_logits: bool) -> Iterator[list[RouterOutput]]:
        """Yield a list that receives the outputs of the forward pass inside the block, layer by layer."""
        self._records, self._keeps_logits = [], with_logits
        try:
            yield self._records
        finally:
            self._records = None

    def _hook(self, index: int, num_chosen: int) -> Any:
        def record(router: nn.Module, inputs: object, output: Any) -> None:
            if self._records is None:
                return
            outputs = output if isinstance(output, tuple) else (output,)
            logits_LE = outputs[index].flatten(0, -2)
            experts = next((one for one in outputs if not one.is_floating_point()), None)
            if experts is None:  # Llama 4 gives scores of all experts
                # Detached: the layer computed again under checkpointing must save the same tensors, without the hook's.
                experts = logits_LE.detach().topk(num_chosen, dim=-1).indices
            saved_logits = logits_LE if self._keeps_logits else None
            self._records.append(RouterOutput(experts.flatten(0, -2).long(), logits_LE.shape[-1], saved_logits))

        return record


def routers(decoder: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the routers of a decoder in the order of its layers, each with the place of the logits in its output."""
    recorder = decoder.can_record_outputs.get("router_logits")
    if not isinstance(recorder, OutputRecorder) or not top_k(decoder):
        return []
    return [
        (module, recorder.index)
        for name, module in decoder.named_modules()
        if isinstance(module, recorder.target_class)
        and (recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}.")
    ]


def top_k(decoder: PreTrainedModel) -> int:
    """Return the number of experts that compute a token; 0 if the config does not say."""
    return int(decoder.config.get_text_config().to_dict().get("num_experts_per_tok") or 0)


def router_coefs(decoder: PreTrainedModel, algorithm: AlgorithmConfig) -> tuple[float, float]:
    """Return the weights of aux loss and z-loss, from the model's config where the settings are null.

    Raises `ConfigError` for a model without known routers, and for null if its config has no such weight.
    """
    aux = _coef(decoder, "router_aux_coef", algorithm.router_aux_coef, "router_aux_loss_coef")
    return aux, _coef(decoder, "router_z_coef", algorithm.router_z_coef, "router_z_loss_coef")


def _coef(decoder: PreTrainedModel, name: str, value: float | None, field: str) -> float:
    if value == 0:
        return 0.0
    setting = f"algorithm.{name}={'null' if value is None else value}"
    config = decoder.config.get_text_config()
    if not routers(decoder):
        raise ConfigError(
            f"{setting} needs a mixture of experts whose routers transformers records (router_logits), found "
            f"{config.model_type}, which has none; set algorithm.{name}=0"
        )
    if value is not None:
        return value
    coef = config.to_dict().get(field)
    if coef is None:
        raise ConfigError(
            f"{setting} takes {field} of the model's config, which {config.model_type} does not have; set "
            f"algorithm.{name} to a number, or to 0 for none"
        )
    return float(coef)
