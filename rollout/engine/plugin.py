"""Lockstep's vLLM plugin: weight transfers, adapters, repairs of vLLM, logs, and the lifetime of engine processes.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). A process started by
`rollout/engine/embedded.py`, marked by `CHILD_ENV`, then exits with its parent, also after SIGKILL (vLLM's own would
run forever), and leaves the terminal's process group, so Ctrl-C reaches only the trainer, which finishes its update.

Not covered: the seconds before plugins are loaded, in which a child imports vLLM.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

from lockstep.rollout.engine import adapters
from lockstep.rollout.engine.repairs import (
    cpu_convolutions,
    cpu_delta_net,
    cpu_logprobs,
    cpu_lora,
    cpu_products,
    cpu_rotary,
    cpu_router,
    cpu_routes,
    head_bias,
    reload,
    xielu,
)
from lockstep.rollout.system.orphan_guard import exit_when_orphaned
from lockstep.rollout.vllm_names import check_vllm

CHILD_ENV = "LOCKSTEP_ENGINE_CHILD"
"""Environment variable set while an embedded engine starts its processes."""
SCHEDULER = "lockstep.rollout.engine.scheduler.buffered_scheduler"
"""`scheduler_cls` of Lockstep's engines and servers."""

CUDA_IPC = "lockstep.rollout.weights.cuda_ipc"
RECEIVERS = {
    "gloo": ("lockstep.rollout.weights.gloo.worker", "GlooWeightTransferEngine"),
    "cuda_ipc": (CUDA_IPC, "CudaIpcWeightTransferEngine"),
}
SENDERS = {"cuda_ipc": (CUDA_IPC, "CudaIpcTrainerWeightTransferEngine")}
"""Module and class of a weight transfer on the side of the engine, and of the trainer where vLLM creates it."""

ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": (
        "lockstep.rollout.engine.architectures.cpu_image_attention",
        "Gemma3ForConditionalGeneration",
    ),
    "Glm4MoeLiteForCausalLM": ("lockstep.rollout.engine.architectures.latent_norms", "Glm4MoeLiteForCausalLM"),
    "PhimoeForCausalLM": ("vllm.model_executor.models.phimoe", "PhiMoEForCausalLM"),  # as transformers writes it
}
"""Module and class by architecture, where vLLM has none or another."""
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


def is_not_of_a_head(record: logging.LogRecord) -> bool:
    """Return False for vLLM's warning, at every weight sync, that a head has loaded nothing.

    A tied head has no weights of its own. The sync itself refuses missing weights, and its canary wrong ones.
    """
    return record.args != ("ParallelLMHead",)


def register() -> None:
    """Entry point `lockstep`; may be called repeatedly.

    Raises `ValueError` for middleware under its former name, `ConfigError` for a vLLM that lacks a name used here.
    """
    if any(word.startswith("rollout.server.") for word in sys.argv):
        raise ValueError("--middleware: Lockstep's packages moved; write lockstep.rollout.server. for rollout.server.")
    check_vllm("weights", "engine")  # a server starts here
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.platforms import current_platform

    # Registering a name twice is an error in vLLM, which has no public way to look a name up.
    for factory, classes in ((WeightTransferEngineFactory, RECEIVERS), (WeightTransferTrainerFactory, SENDERS)):
        for name, place in classes.items():
            if name not in factory._registry:
                factory.register_engine(name, *place)
    for architecture, (module, name) in ARCHITECTURES.items():
        if vars(ModelRegistry.models.get(architecture, object)).get("module_name") != module:
            ModelRegistry.register_model(architecture, f"{module}:{name}")
    logging.getLogger(RELOAD_LOGGER).addFilter(is_not_of_a_head)
    reload.install()
    head_bias.install()
    xielu.install()
    adapters.install()
    if current_platform.is_cpu():
        check_vllm("cpu")
        cpu_logprobs.install()
        cpu_delta_net.install()
        cpu_products.install()
        cpu_lora.install()
        cpu_convolutions.install()
        cpu_rotary.install()
        cpu_router.install()
        cpu_routes.install()
    parent = multiprocessing.parent_process()
    if CHILD_ENV in os.environ and parent is not None:
        if os.getpgrp() != os.getpid():  # a process that already leads a group may not start a session
            os.setsid()
        exit_when_orphaned(sentinel=parent.sentinel)
