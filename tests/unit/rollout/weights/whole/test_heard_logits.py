"""Which of the rows that reach an engine's head are those of a prompt, with a head of the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.rollout.errors import EngineError
from lockstep.rollout.weights.whole.heard_logits import HeardLogits, hear

VOCAB, WIDTH = 50, 16
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
STATES = torch.randn(len(IDS) - 1, WIDTH, generator=torch.Generator().manual_seed(0))
OTHERS = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.logits_processor = Logits()

    def compute_logits(self, states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, states)


class Logits(nn.Module):
    def forward(self, head: nn.Linear, states: Tensor) -> Tensor:
        return head(states)


class Worker(HeardLogits):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()

    def get_model(self) -> nn.Module:
        return self.model


def engine(*calls: Tensor, with_logits: bool = True) -> Any:
    """An engine whose head computes these states while it scores a prompt."""
    worker = Worker()
    with torch.no_grad():
        logits = worker.model.lm_head(STATES)
    scores = logits.log_softmax(1)[range(len(STATES)), IDS[1:]].tolist()

    async def score(ids: list[int]) -> list[float]:
        for states in calls:
            buffer = states.clone()
            worker.model.compute_logits(buffer)
            buffer.zero_()  # as the buffers of CUDA graphs are used again
        return scores

    async def ask_workers(method: str, *arguments: Any) -> list[Any]:
        return [None, getattr(worker, method)(*arguments)]

    return SimpleNamespace(name="engine 0", score=score, ask_workers=ask_workers, expected=logits)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param([STATES], id="alone, as in the V1 runner"),
        pytest.param([torch.cat([STATES, OTHERS[:1]]), OTHERS[:1]], id="with its last position, as in V2"),
        pytest.param([OTHERS[:7], torch.cat([OTHERS[:90], STATES, OTHERS[90:]]), OTHERS[:60]], id="among others"),
    ],
)
def test_the_rows_of_a_prompt_are_found(calls: list[Tensor]) -> None:
    served = engine(*calls)
    logits, num_bytes = asyncio.run(hear(served, IDS, [0, 2, 6]))
    torch.testing.assert_close(logits, served.expected[[0, 2, 6]])
    assert 3 * VOCAB * 4 < num_bytes < 1.4 * 3 * VOCAB * 4


@pytest.mark.parametrize("calls", [[OTHERS], [STATES[:4], STATES[4:]], []], ids=["of others", "in parts", "none"])
def test_logits_of_another_prompt_are_refused(calls: list[Tensor]) -> None:
    with pytest.raises(EngineError, match="none of the logits of its head belong to the prompt that it scored"):
        asyncio.run(hear(engine(*calls), IDS, [0]))


def test_hooks_are_gone_afterwards() -> None:
    worker = Worker()
    worker.hear_logits()
    worker.heard_logits(IDS, [0.0] * 7, [0])
    assert not worker.model.logits_processor._forward_pre_hooks


def test_hooks_of_a_request_that_failed_are_gone_after_the_next() -> None:
    worker = Worker()
    worker.hear_logits()
    worker.hear_logits()
    assert len(worker.model.logits_processor._forward_pre_hooks) == 1
    worker.heard_logits(IDS, [0.0] * 7, [0])
    assert not worker.model.logits_processor._forward_pre_hooks
    assert worker.heard_logits(IDS, [0.0] * 7, [0]) is None, "nothing was heard since"


@pytest.mark.parametrize(
    "answer",
    [
        [0.0, "load", [1, 2], "AAAAAAAAAAA="],
        [0.0, "float32", [1, 2], "no base64"],
        [0.0, "float32", [1, 2], ""],
        [0.0, "float32", [2, 1], "AAAAAAAAAAA="],
        [0.0, "float32", [2], "AAAAAAAAAAA="],
        [0.0, "float32", [1, 3], "AAAAAAAAAAA="],
        ["near", "float32", [1, 2], "AAAAAAAAAAA="],
        [0.0, ["float32"], [1, 2], "AAAAAAAAAAA="],
        {"distance": 0.0},
        7,
    ],
)
def test_an_answer_other_than_a_table_of_logits_is_refused(answer: Any) -> None:
    served = engine(STATES)

    async def ask_workers(method: str, *arguments: Any) -> list[Any]:
        return [answer]

    served.ask_workers = ask_workers
    with pytest.raises(EngineError, match=r"its workers sent no table of logits .*; restart it"):
        asyncio.run(hear(served, IDS, [0]))


def test_logits_of_half_precision_name_their_own_limit() -> None:
    served = engine(STATES)

    async def ask_workers(method: str, *arguments: Any) -> list[Any]:
        return [[0.7, "bfloat16", [1, 2], "AAAAAA=="]]

    served.ask_workers = ask_workers
    with pytest.raises(EngineError, match=r"the nearest are 0\.7 away, expected at most 0\.2"):
        asyncio.run(hear(served, IDS, [0]))
