"""Generators of requests that go on after drawn tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lockstep.rollout.engine.scheduler import advance_generators


def test_a_request_begins_as_many_draws_later_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any, scheduler_output: Any) -> str:
        return "corrections"

    monkeypatch.setattr(GPUModelRunner, "_update_states", update)
    advance_generators()
    advance_generators()  # twice is once
    extras = {"goes on": {"drawn": 5}, "new": None, "other": {"x": 1}, "text": {"drawn": "5"}, "more": {"drawn": 99}}
    requests = {name: SimpleNamespace(generator=torch.Generator().manual_seed(7)) for name in extras}
    requests["greedy"] = SimpleNamespace(generator=None)
    new = [
        SimpleNamespace(
            req_id=name,
            sampling_params=SimpleNamespace(extra_args=extras.get(name, {"drawn": 3})),
            prompt_token_ids=[1] * 6,
        )
        for name in requests
    ]
    runner = SimpleNamespace(requests=requests)
    output = SimpleNamespace(scheduled_new_reqs=new)
    assert GPUModelRunner._update_states(runner, output) == "corrections"  # type: ignore[arg-type]

    def draw(name: str) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=requests[name].generator, dtype=torch.long))

    draws = torch.Generator().manual_seed(7)
    expected = [int(torch.randint(0, 2**31, (1,), generator=draws, dtype=torch.long)) for _ in range(7)]
    assert [draw("new"), draw("other"), draw("text")] == [expected[0]] * 3
    assert [draw("goes on"), draw("more")] == expected[5:], "at most as many as the prompt has tokens"
