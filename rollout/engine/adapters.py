"""LoRA adapters in vLLM's engine: the policy's, which weight transfers bring, and those on disk.

vLLM loads adapters from directories only. Here an engine that was started for adapters keeps its base weights, and
a weight transfer, whichever it is, hands its tensors to an `AdapterReceiver` (`adapter_receiver.py`) in place of the
model:

    transfer ─► AdapterReceiver: stage ─finish─► check, keep ─► vLLM loads the adapter from here when a request names it

After every transfer vLLM drops all loaded adapters, so the next request loads what was kept last. Requests without an
adapter sample from the base. Until the first transfer the policy's adapter is empty, which is the base as well.

Only linear layers are prepared for adapters. vLLM would also prepare the head, the embedding and stacked experts, which
no run adapts: it would multiply by zeros there, its scores of several prompts fail with such a head, and experts would
get other kernels, which a CPU lacks.

Covered: every transfer, tensor-parallel workers (each gets whole tensors and takes its slices). Refused: layers that
vLLM has no adapters for, wrong shapes, values that are not finite; the adapter in use then stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.rollout.engine.protocol import BASE, POLICY, buffer_rank
from lockstep.rollout.errors import EngineError

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    from lockstep.rollout.engine.adapter_receiver import AdapterReceiver

POLICY_PATH = "lockstep:policy"
"""Stands for the directory of the policy's adapter in requests: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Adapters that an engine must be able to hold."""

    max_rank: int
    others: tuple[tuple[str, str], ...] = ()
    """Names and directories of adapters beside the policy's."""

    def served(self) -> list[tuple[str, str]]:
        """Return names and directories of all adapters. A server numbers them in this order, from 1."""
        return [(POLICY, POLICY_PATH), *self.others]

    def request(self, name: str) -> LoRARequest | None:
        """Return what a request for this adapter carries; None for the base. Raises `EngineError` for another name."""
        from vllm.lora.request import LoRARequest

        if name == BASE:
            return None
        for number, (adapter_name, path) in enumerate(self.served(), 1):
            if name == adapter_name:
                return LoRARequest(name, number, path)
        names = ", ".join([BASE, *(adapter_name for adapter_name, _ in self.served())])
        raise EngineError(f"the engine has no adapter {name}; it has {names}")

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's engine arguments."""
        number = 1 + len(self.others)
        return {
            "enable_lora": True,
            "max_lora_rank": buffer_rank(self.max_rank),
            "max_loras": number,
            "max_cpu_loras": number,
        }


def refuse_adapter(model: str, *, source: str) -> None:
    """Raise `EngineError` if a request to an engine without adapters names one: the base would answer for it."""
    if model not in (POLICY, BASE):
        raise EngineError(f"{source} was started without adapters, and a request is for {model}; see model.adapters")


def _is_synced() -> bool:
    """Return True while vLLM builds an engine that takes weights; others in this environment are left as they are."""
    from vllm.config.vllm import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.weight_transfer_config is not None


def install() -> None:
    """Let weight transfers of engines with adapters bring the policy's; may be called repeatedly."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.lora import model_manager
    from vllm.lora.utils import get_supported_lora_modules
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.linear import LinearBase

    create, load = WeightTransferEngineFactory.create_engine, WorkerLoRAManager._load_adapter
    check, list_supported = FusedMoEConfig.__post_init__, get_supported_lora_modules
    if getattr(load, "takes_policy", False):
        return

    def create_engine(config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> WeightTransferEngine:
        if vllm_config.lora_config is None:
            return create(config, vllm_config, device, model)
        from lockstep.rollout.engine.adapter_receiver import AdapterReceiver  # engines without adapters do not load it

        manager: Any = model.lora_manager  # set by the manager itself
        receiver = manager.receiver = AdapterReceiver(manager)
        engine = create(config, vllm_config, device, receiver)
        start, finish = engine.start_weight_update, engine.finish_weight_update

        def start_weight_update() -> None:
            receiver.begin()
            start()

        def finish_weight_update() -> None:
            finish()
            receiver.finish()

        engine.start_weight_update, engine.finish_weight_update = start_weight_update, finish_weight_update  # type: ignore[method-assign]
        return engine

    def load_adapter(manager: WorkerLoRAManager, lora_request: LoRARequest) -> LoRAModel:
        receiver: AdapterReceiver | None = vars(manager._adapter_manager).get("receiver")
        if receiver is None:  # an engine that takes no weights
            return load(manager, lora_request)
        if lora_request.lora_path != POLICY_PATH:
            adapter = load(manager, lora_request)
            receiver.check_loaded(lora_request.lora_name, adapter)
            return adapter
        return receiver.adapter(lora_request.lora_int_id)

    def linear_layers(model: nn.Module) -> list[str]:
        if not _is_synced():
            return list_supported(model)
        names = (name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LinearBase))
        return sorted(set(names))

    def has_plain_experts(config: FusedMoEConfig) -> None:
        if _is_synced():
            config.is_lora_enabled = False
        check(config)

    load_adapter.takes_policy = True  # type: ignore[attr-defined]
    WeightTransferEngineFactory.create_engine = create_engine  # type: ignore[method-assign,assignment]
    WorkerLoRAManager._load_adapter = load_adapter  # type: ignore[method-assign]
    model_manager.get_supported_lora_modules = linear_layers  # pyright: ignore[reportPrivateImportUsage]
    FusedMoEConfig.__post_init__ = has_plain_experts  # type: ignore[method-assign]
