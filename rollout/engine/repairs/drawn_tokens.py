"""Requests that go on after tokens which an earlier request with their seed has drawn (`Sampling.drawn`).

vLLM's V1 runner gives each seeded request a generator, from which on a CPU every token takes one number
(`TopKTopPSampler.forward_cpu`). So a request whose prompt ends with k drawn tokens begins k numbers later.
The V2 runner hashes the seed with the position of the token, and needs nothing.

Installed when the first such request arrives, in the process of the scheduler, which is the worker's with the executor
`uni` of embedded engines.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lockstep.rollout.vllm_names import check_vllm


def install() -> None:
    """Advance the generators of requests with `drawn` in their `extra_args`; may be called repeatedly."""
    check_vllm("drawn")
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states
    if getattr(update, "__wrapped__", None) is not None:
        return

    @functools.wraps(update)
    def _update_states(self: GPUModelRunner, scheduler_output: Any) -> Any:
        result = update(self, scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            sampling = new.sampling_params
            generator = self.requests[new.req_id].generator
            if sampling is not None and generator is not None:
                for _ in range((sampling.extra_args or {}).get("drawn", 0)):
                    torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return result

    GPUModelRunner._update_states = _update_states
