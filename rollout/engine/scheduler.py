"""vLLM's own scheduler, which answers a request once: when it is over.

vLLM sends what each request sampled after every step, to the process that asked. Lockstep reads whole completions, and
making, packing and unpacking those messages costs 22 µs of CPU a token, most of it for the three small arrays of a
logprob. Here they wait in the engine's process until the request ends, and travel as one.

They must not wait over a change of weights, because vLLM labels a message with the version that is loaded when it is
sent. Weights change only while the engine is paused: a pause that drains ends every request, and one that freezes them
sends what has waited before it is complete.

Requests whose output is read as it comes (streams of a server) are answered as ever. Chosen through vLLM's
`scheduler_cls`, which it documents and does not promise to keep.

Runs in the engine's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    Base = Scheduler
else:
    Base = object

EXTRAS = (
    *("new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "new_sampling_mask", "pooling_output"),
    *("routed_experts", "kv_transfer_params", "ec_transfer_params"),
)
"""What an output may hold beside tokens and their logprobs; with any of it, it is sent at once."""


class AnswersOnce(Base):
    """What the two schedulers below change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waiting_outputs: dict[str, tuple[int, list[EngineCoreOutput]]] = {}
        """By request: the client that asked, and what it was not sent yet."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        messages = super().update_from_output(*args, **kwargs)
        is_frozen = self.pause_state == PauseState.PAUSED_ALL
        for client, message in list(messages.items()):
            message.outputs = [
                joined([*self._take(output.request_id), output])
                for output in message.outputs
                if is_frozen or not self._waits(client, output)
            ]
            if not (message.outputs or message.finished_requests or message.scheduler_stats):
                del messages[client]
        if is_frozen:
            for request_id, (client, _) in list(self._waiting_outputs.items()):
                message = messages.setdefault(client, EngineCoreOutputs())
                message.outputs.append(joined(self._take(request_id)))
        return messages

    def has_requests(self) -> bool:
        """Also a frozen engine makes one more step, without tokens, if something waits to be sent."""
        return super().has_requests() or (self.pause_state == PauseState.PAUSED_ALL and len(self._waiting_outputs) > 0)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Requests that are given up are not waited for any more."""
        finished = super().finish_requests(*args, **kwargs)
        for request in finished:
            self._take(request.request_id)
        return finished

    def _waits(self, client: int, output: EngineCoreOutput) -> bool:
        """Whether an output need not be sent yet; then it is kept."""
        if output.finished or any(getattr(output, name) is not None for name in EXTRAS):
            return False
        request = self.requests.get(output.request_id)
        sampling = request.sampling_params if request is not None else None
        if sampling is None or sampling.output_kind != RequestOutputKind.FINAL_ONLY:
            return False
        self._waiting_outputs.setdefault(output.request_id, (client, []))[1].append(output)
        return True

    def _take(self, request_id: str) -> list[EngineCoreOutput]:
        return self._waiting_outputs.pop(request_id, (0, []))[1]


class OnceScheduler(AnswersOnce, Scheduler):
    """Where vLLM would take `Scheduler`."""


class OnceAsyncScheduler(AnswersOnce, AsyncScheduler):
    """Where vLLM would take `AsyncScheduler`."""


def once(*, vllm_config: VllmConfig, **settings: Any) -> Scheduler:
    """What `scheduler_cls` names: the one of the two that stands where vLLM's own choice would."""
    chosen = OnceAsyncScheduler if vllm_config.scheduler_config.async_scheduling else OnceScheduler
    return chosen(vllm_config=vllm_config, **settings)


def joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Consecutive outputs of one request as one: the last one, with the tokens of all."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    logprobs = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if logprobs:
        last.new_logprobs = LogprobsLists(
            logprob_token_ids=np.concatenate([part.logprob_token_ids for part in logprobs]),
            logprobs=np.concatenate([part.logprobs for part in logprobs]),
            sampled_token_ranks=np.concatenate([part.sampled_token_ranks for part in logprobs]),
        )
    last.prefill_stats = next((output.prefill_stats for output in outputs if output.prefill_stats is not None), None)
    return last
