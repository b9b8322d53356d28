"""vLLM's scheduler with buffered outputs: one message per completed request. Runs in the engine's process.

vLLM sends the tokens of every request after every step: 22 µs of CPU per token, mostly for the three small arrays of a
logprob. Lockstep reads whole completions, so here the outputs stay in the engine's process until the request ends.

Outputs must be sent before weights change, because vLLM labels a message with the version loaded when it is sent.
Weights change only while the engine is paused: a draining pause ends every request, a freezing one first sends the
buffered outputs. Selected through vLLM's `scheduler_cls`, which is documented but not guaranteed to stay.

Requests that score a prompt go before those that wait to sample: the canary of a weight sync, for which the trainer
waits, would else be scored after all rollouts in the queue.

Requests that go on after drawn tokens (`Sampling.drawn`) come by here, too: with the executor `uni` of embedded engines
the process of the scheduler is the worker's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from lockstep.rollout.vllm_names import check_vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    Base = Scheduler
else:
    Base = object

EXTRAS = (
    *("new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "new_sampling_mask", "pooling_output"),
    *("kv_transfer_params", "ec_transfer_params"),
)
"""Fields of an output beside tokens and logprobs; an output with any of them is sent at once."""


class BufferedOutputs(Base):
    """Mixin that buffers the outputs of a request until it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffered: dict[str, tuple[int, list[EngineCoreOutput]]] = {}
        """Client and unsent outputs, by request."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if model_runner_output.logprobs is not None:
            model_runner_output.logprobs = _copy(model_runner_output.logprobs)
        messages = super().update_from_output(scheduler_output, model_runner_output)
        is_frozen = self.pause_state == PauseState.PAUSED_ALL
        for client, message in list(messages.items()):
            message.outputs = [
                merge_outputs([*self._take(output.request_id), output])
                for output in message.outputs
                if is_frozen or not self._buffer(client, output)
            ]
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del messages[client]
        if is_frozen:
            for request_id, (client, _) in list(self._buffered.items()):
                message = messages.setdefault(client, EngineCoreOutputs())
                message.outputs.append(merge_outputs(self._take(request_id)))
        return messages

    def add_request(self, request: Request) -> None:
        if _count_drawn(request.sampling_params):
            advance_generators()
        super().add_request(request)
        queue = cast("RequestQueue", self.waiting)
        if _scores(request) and request in queue and not all(map(_scores, queue)):
            queue.remove_request(request)
            queue.prepend_request(request)

    def has_requests(self) -> bool:
        """Return True also for a frozen engine with buffered outputs: one more step, without tokens, sends them."""
        return super().has_requests() or (self.pause_state == PauseState.PAUSED_ALL and len(self._buffered) > 0)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Discard the buffered outputs of aborted requests."""
        finished_requests = super().finish_requests(*args, **kwargs)
        for request in finished_requests:
            self._take(request.request_id)
        return finished_requests

    def _buffer(self, client: int, output: EngineCoreOutput) -> bool:
        """Buffer an output that need not be sent yet; return True if it was buffered."""
        if output.routed_experts is not None:
            output.routed_experts = output.routed_experts.copy()  # a view of those of all requests of the step
        if output.finished or any(getattr(output, name) is not None for name in EXTRAS):
            return False
        request = self.requests.get(output.request_id)
        sampling = request.sampling_params if request is not None else None
        if sampling is None or sampling.output_kind != RequestOutputKind.FINAL_ONLY:
            return False
        self._buffered.setdefault(output.request_id, (client, []))[1].append(output)
        return True

    def _take(self, request_id: str) -> list[EngineCoreOutput]:
        return self._buffered.pop(request_id, (0, []))[1]


class BufferedScheduler(BufferedOutputs, Scheduler):
    """Replacement of vLLM's `Scheduler`."""


class BufferedAsyncScheduler(BufferedOutputs, AsyncScheduler):
    """Replacement of vLLM's `AsyncScheduler`."""


def buffered_scheduler(*, vllm_config: VllmConfig, **settings: Any) -> Scheduler:
    """Return the replacement of the scheduler that vLLM would choose. Named by `scheduler_cls`."""
    scheduler_class = BufferedAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BufferedScheduler
    return scheduler_class(vllm_config=vllm_config, **settings)


def advance_generators() -> None:
    """Let requests with `drawn` in their `extra_args` begin that many draws later; may be called repeatedly.

    vLLM's V1 runner gives each seeded request a generator, from which on a CPU every token takes one number
    (`TopKTopPSampler.forward_cpu`). The V2 runner hashes the seed with the position of the token, and needs nothing.
    """
    check_vllm("drawn")
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states
    if getattr(update, "__wrapped__", None) is not None:
        return

    @functools.wraps(update)
    def _update_states(self: GPUModelRunner, scheduler_output: SchedulerOutput) -> Any:
        result = update(self, scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            generator, count = self.requests[new.req_id].generator, _count_drawn(new.sampling_params)
            for _ in range(min(count, len(new.prompt_token_ids or ())) if generator is not None else 0):
                torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return result

    GPUModelRunner._update_states = _update_states


def _scores(request: Request) -> bool:
    """Return True if a request scores its prompt, and samples only the token that vLLM demands."""
    sampling = request.sampling_params
    return sampling is not None and sampling.prompt_logprobs is not None and sampling.max_tokens == 1


def _count_drawn(sampling: SamplingParams | None) -> int:
    """Return `Sampling.drawn` of a request; 0 for anything else that a client of a server sent under its name."""
    count = (sampling.extra_args or {}).get("drawn") if sampling is not None else None
    return count if type(count) is int else 0


def _copy(logprobs: LogprobsLists) -> LogprobsLists:
    """Copy the logprobs of a step out of the pinned memory that a GPU wrote, which buffered outputs would keep."""
    return LogprobsLists(
        logprobs.logprob_token_ids.copy(),
        logprobs.logprobs.copy(),
        logprobs.sampled_token_ranks.copy(),
        logprobs.cu_num_generated_tokens,
    )


def merge_outputs(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Merge consecutive outputs of one request into the last one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if logprobs:
        # A step's arrays are as wide as the request of its batch with the most logprobs needs. Those of this request
        # are first, so the narrowest step has them all.
        width = min(part.logprobs.shape[1] for part in logprobs)
        last.new_logprobs = LogprobsLists(
            logprob_token_ids=np.concatenate([part.logprob_token_ids[:, :width] for part in logprobs]),
            logprobs=np.concatenate([part.logprobs[:, :width] for part in logprobs]),
            sampled_token_ranks=np.concatenate([part.sampled_token_ranks for part in logprobs]),
        )
    routes = [output.routed_experts for output in outputs if output.routed_experts is not None]
    if routes:
        last.routed_experts = np.concatenate(routes)
    last.prefill_stats = next((output.prefill_stats for output in outputs if output.prefill_stats is not None), None)
    return last
