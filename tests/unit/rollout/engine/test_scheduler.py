"""Buffered outputs of a request: sent as one message, complete, and before a change of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from lockstep.rollout.engine import scheduler as schedulers
from lockstep.rollout.engine.plugin import SCHEDULER
from lockstep.rollout.engine.scheduler import BufferedAsyncScheduler, BufferedOutputs, BufferedScheduler

FINAL_ONLY = RequestOutputKind.FINAL_ONLY
NOTHING = SimpleNamespace(logprobs=None)
"""A step's output of the model runner, in place of which the scripted scheduler has its own."""


class Scripted:
    """A scheduler with scripted steps: the outputs vLLM's own would return after each."""

    def __init__(self, steps: list[list[EngineCoreOutput]], kind: RequestOutputKind | None = FINAL_ONLY) -> None:
        sampling = None if kind is None else SamplingParams(output_kind=kind)
        ids = {output.request_id for outputs in steps for output in outputs}
        self.requests = {request_id: SimpleNamespace(sampling_params=sampling) for request_id in ids}
        self._steps = iter(steps)
        self.pause_state = PauseState.UNPAUSED

    def update_from_output(self, scheduled: Any, sampled: Any) -> dict[int, EngineCoreOutputs]:
        self.sampled = sampled
        outputs = next(self._steps, [])
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}

    def has_requests(self) -> bool:
        return False

    def finish_requests(self, requests: list[Any]) -> list[Any]:
        return requests


class Buffered(BufferedOutputs, Scripted):
    pass


def sampled(request: str, token: int, *, finish: FinishReason | None = None, **more: Any) -> EngineCoreOutput:
    logprobs = LogprobsLists(np.array([[token]]), np.array([[-float(token)]]), np.array([1]))
    return EngineCoreOutput(
        request_id=request, new_token_ids=[token], new_logprobs=logprobs, finish_reason=finish, **more
    )


def sent(scheduler: Buffered) -> dict[str, tuple[list[int], list[float]]]:
    """Return tokens and logprobs sent by one step, by request."""
    found = {}
    for message in scheduler.update_from_output(None, NOTHING).values():
        for output in message.outputs:
            assert output.new_logprobs is not None
            assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == output.new_token_ids
            found[output.request_id] = (output.new_token_ids, output.new_logprobs.logprobs[:, 0].tolist())
    return found


class Queued(Scripted):
    def __init__(self) -> None:
        super().__init__([])
        self.waiting = create_request_queue(SchedulingPolicy.FCFS)

    def add_request(self, request: Any) -> None:
        self.waiting.add_request(request)


class BufferedQueue(BufferedOutputs, Queued):
    pass


def test_requests_that_score_go_before_those_that_sample() -> None:
    scheduler = BufferedQueue()
    sampling, scoring = SamplingParams(max_tokens=9), SamplingParams(max_tokens=1, prompt_logprobs=0)
    requests = [
        SimpleNamespace(name=name, sampling_params=one)
        for name, one in zip("abc", [sampling, sampling, scoring], strict=True)
    ]
    both = SamplingParams(max_tokens=9, prompt_logprobs=0)
    others = [SimpleNamespace(name=name, sampling_params=one) for name, one in (("d", None), ("e", both))]
    for request in [*requests, *others]:
        scheduler.add_request(request)  # type: ignore[arg-type]
    assert [request.name for request in scheduler.waiting] == ["c", "a", "b", "d", "e"]  # type: ignore[attr-defined]


def test_requests_that_score_keep_their_order_where_nothing_else_waits() -> None:
    scheduler = BufferedQueue()
    for name in "ab":
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scheduler.add_request(SimpleNamespace(name=name, sampling_params=scoring))  # type: ignore[arg-type]
    assert [request.name for request in scheduler.waiting] == ["a", "b"]  # type: ignore[attr-defined]


def test_a_request_is_sent_when_it_ends() -> None:
    steps = [
        [sampled("a", 1), sampled("b", 2)],
        [sampled("a", 3), sampled("b", 4, finish=FinishReason.STOP)],
        [sampled("a", 5, finish=FinishReason.LENGTH)],
    ]
    scheduler = Buffered(steps)
    assert sent(scheduler) == {}
    assert sent(scheduler) == {"b": ([2, 4], [-2.0, -4.0])}
    assert sent(scheduler) == {"a": ([1, 3, 5], [-1.0, -3.0, -5.0])}


def test_steps_of_different_widths_are_merged_to_the_narrowest() -> None:
    def step(token: int, width: int, finish: FinishReason | None = None) -> list[EngineCoreOutput]:
        output = sampled("a", token, finish=finish)
        ids = np.arange(token, token + width)[None]
        output.new_logprobs = LogprobsLists(ids, -ids.astype(float), np.array([1]))
        return [output]

    scheduler = Buffered([step(1, 1), step(5, 21), step(9, 3, FinishReason.STOP)])
    assert sent(scheduler) == sent(scheduler) == {}
    assert sent(scheduler) == {"a": ([1, 5, 9], [-1.0, -5.0, -9.0])}


def test_a_step_without_ended_requests_sends_no_message() -> None:
    assert Buffered([[sampled("a", 1)]]).update_from_output(None, NOTHING) == {}


def test_buffered_outputs_are_sent_before_weights_can_change() -> None:
    scheduler = Buffered([[sampled("a", 1)], [], [sampled("a", 2, finish=FinishReason.STOP)]])
    assert sent(scheduler) == {}
    assert not scheduler.has_requests()
    scheduler.pause_state = PauseState.PAUSED_ALL
    assert scheduler.has_requests(), "the engine must not complete the pause yet"
    assert sent(scheduler) == {"a": ([1], [-1.0])}
    assert not scheduler.has_requests()
    scheduler.pause_state = PauseState.UNPAUSED
    assert sent(scheduler) == {"a": ([2], [-2.0])}


def test_an_aborted_request_leaves_nothing_buffered() -> None:
    scheduler = Buffered([[sampled("a", 1)]])
    assert sent(scheduler) == {}
    scheduler.finish_requests([sampled("a", 0)])  # only its request_id is read
    scheduler.pause_state = PauseState.PAUSED_ALL
    assert not scheduler.has_requests()


def test_an_output_with_more_than_tokens_is_sent_at_once() -> None:
    first = sampled("a", 1, kv_transfer_params={"x": 1})
    assert sent(Buffered([[first]])) == {"a": ([1], [-1.0])}


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, None])
def test_streamed_outputs_are_not_buffered(kind: RequestOutputKind | None) -> None:
    steps = [[sampled("a", 1)], [sampled("a", 2, finish=FinishReason.STOP)]]
    scheduler = Buffered(steps, kind)
    assert sent(scheduler) == {"a": ([1], [-1.0])}
    assert sent(scheduler) == {"a": ([2], [-2.0])}


@pytest.mark.parametrize(("is_async", "own"), [(False, Scheduler), (True, AsyncScheduler)])
def test_it_replaces_the_scheduler_that_vllm_would_choose(
    is_async: bool, own: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for kind in (BufferedScheduler, BufferedAsyncScheduler):
        monkeypatch.setattr(kind, "__init__", lambda self, **settings: made.append((type(self), settings)))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    make = resolve_obj_by_qualname(SCHEDULER)
    assert make is schedulers.buffered_scheduler
    assert isinstance(make(vllm_config=config, block_size=16), own)
    assert made == [
        (BufferedAsyncScheduler if is_async else BufferedScheduler, {"vllm_config": config, "block_size": 16})
    ]


def test_buffered_outputs_do_not_keep_the_memory_that_the_gpu_writes_to() -> None:
    pinned = LogprobsLists(np.array([[5], [6]]), np.array([[-5.0], [-6.0]]), np.array([1, 1]), [0, 1, 2])
    scheduler = Buffered([])
    scheduler.update_from_output(None, SimpleNamespace(logprobs=pinned))  # type: ignore[arg-type]
    copied = scheduler.sampled.logprobs
    assert [array.tolist() for array in copied[:3]] == [array.tolist() for array in pinned[:3]]
    assert copied.cu_num_generated_tokens == [0, 1, 2]
    assert not any(np.shares_memory(a, b) for a, b in zip(copied[:3], pinned[:3], strict=True))


def test_routed_experts_of_all_steps_are_sent_together_and_copied() -> None:
    step = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    scheduler = Buffered(
        [
            [sampled("a", 1, routed_experts=step[:2])],
            [sampled("a", 2, routed_experts=step[2:], finish=FinishReason.STOP)],
        ]
    )
    assert sent(scheduler) == {}
    (_, (held,)) = scheduler._buffered["a"]
    assert held.routed_experts.base is None, "a view would keep the experts of all requests of the step"
    (message,) = scheduler.update_from_output(None, NOTHING).values()
    (output,) = message.outputs
    assert output.new_token_ids == [1, 2]
    assert np.array_equal(output.routed_experts, step)
