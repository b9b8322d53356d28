"""Routed experts on a CPU: vLLM's own capture and store, driven by the model runner that runs there.

vLLM returns the experts of each token (`enable_return_routed_experts`) from Model Runner V2 alone, which needs Triton;
on a CPU V1 runs. The parts do not depend on the runner: the scheduler announces requests and their block hashes with
each step, `AuxOutputWorkerConnector` captures the step's experts and keeps those of cached blocks, and the scheduler
takes them from the step's output. Here V1 makes these calls.

Tokens found in the prefix cache keep the experts of the request that computed them. The store of cached blocks takes
(layers x experts per token) bytes per token of the KV cache, twice that beyond 256 experts. vLLM refuses an engine
without a prefix cache, because that store names blocks by their hashes. Without one (recurrent layers on a CPU) nothing
needs to be stored: a step computes a prompt as a whole, and its experts are returned with the step.

Not covered: speculative decoding, asynchronous scheduling (off on a CPU), several workers; prompts in several steps
without a prefix cache.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput


@dataclass(frozen=True, slots=True)
class StepRequests:
    """Requests of a step as the connector reads them from an input batch of Model Runner V2."""

    req_ids: list[str]
    query_start_loc_np: np.ndarray
    """(requests + 1,) bounds of each request's tokens within the step."""
    num_computed_tokens_np: np.ndarray
    """(requests,) tokens of each request before the step."""


def install() -> None:
    """Extend V1's CPU runner of this process's vLLM, for engines created later; may be called repeatedly."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.v1.worker import cpu_worker as worker_module
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    cpu_worker: Any = worker_module  # which names the runner without exporting it
    if cpu_worker.CPUModelRunner is not CPUModelRunner:
        return

    class UncachedRoutes(AuxOutputWorkerConnector):
        """vLLM's connector for an engine that finds no token in a cache: it returns what each step has computed."""

        def _commit_output(self, pending: PendingAuxOutput) -> dict[str, AuxRequestOutput]:
            outputs = routes_of_step(pending, {name: state.emit_cursor for name, state in self._requests.items()})
            for name, output in outputs.items():
                self._requests[name].emit_cursor += len(output.rows)
            return outputs

    class RoutedRunner(CPUModelRunner):
        """V1's runner with routed experts in its outputs, if the configuration asks for them."""

        _connector: AuxOutputWorkerConnector | None = None
        _pending: PendingAuxOutput | None = None

        def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
            if self.vllm_config.aux_output_config.enabled:
                is_cached = self.vllm_config.cache_config.enable_prefix_caching
                self._connector = (AuxOutputWorkerConnector if is_cached else UncachedRoutes)(
                    model=self.model, vllm_config=self.vllm_config, kv_cache_config=kv_cache_config
                )

        def _update_states(self, scheduler_output: Any) -> Any:
            """Announce the step's requests before its forward pass, also for a step without tokens."""
            if self._connector is not None:
                self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
            return super()._update_states(scheduler_output)

        def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super()._model_forward(*args, **kwargs)
            if self._connector is not None:
                num = self.input_batch.num_reqs
                self._pending = self._connector.prepare_output(
                    StepRequests(
                        self.input_batch.req_ids[:num],
                        self.query_start_loc.np[: num + 1].copy(),
                        self.input_batch.num_computed_tokens_cpu[:num].copy(),
                    )  # type: ignore[arg-type]
                )
            return output

        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
            output = super().sample_tokens(*args, **kwargs)
            pending, self._pending = self._pending, None
            if pending is not None:
                counts = np.array([len(ids) for ids in output.sampled_token_ids])
                pending.enqueue_cpu_copy(counts, np.zeros_like(counts))
                output.aux_output_connector_output = pending.process_output()
            return output

        def shutdown(self) -> None:
            if self._connector is not None:
                self._connector.close()
            super().shutdown()

    cpu_worker.CPUModelRunner = RoutedRunner
    VllmConfig._verify_aux_output_compatibility = _on_v1(VllmConfig._verify_aux_output_compatibility)


def routes_of_step(pending: PendingAuxOutput, wanted: Mapping[str, int]) -> dict[str, AuxRequestOutput]:
    """Return the experts of a step, (tokens, layers, k), for the requests that have sampled in it.

    wanted: first token of each request whose experts are not returned yet. It is in the step: a prompt is computed as a
    whole, and a preempted request again from its start.
    """
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

    routes, num_sampled = pending.routed_experts, pending.num_sampled
    assert routes is not None, "copied before"
    assert num_sampled is not None
    outputs = {}
    for request, first, start, end, count in zip(
        pending.request_ids,
        pending.token_starts,
        pending.query_start_loc[:-1],
        pending.query_start_loc[1:],
        num_sampled,
        strict=True,
    ):
        if count > 0:
            offset = wanted[request] - first
            assert offset >= 0, "experts of a token of an earlier step, which are not stored without a prefix cache"
            outputs[request] = AuxRequestOutput(wanted[request], routes[start + offset : end])
    return outputs


def _on_v1(verify: Any) -> Any:
    """Return vLLM's check of a configuration without its demands for Model Runner V2 and, if prompts are computed as a
    whole, for a prefix cache; with all its others."""

    @functools.wraps(verify)
    def verified(config: VllmConfig) -> None:
        from vllm.platforms import current_platform

        # vLLM leaves this demand out for platforms outside of it, which bring their own runner, as this module does.
        current_platform.is_out_of_tree = lambda: True  # type: ignore[method-assign]
        is_cached = config.cache_config.enable_prefix_caching
        if not config.scheduler_config.enable_chunked_prefill:
            config.cache_config.enable_prefix_caching = True
        try:
            verify(config)
        finally:
            config.cache_config.enable_prefix_caching = is_cached
            del current_platform.is_out_of_tree  # uncovers the method of the class

    return verified
