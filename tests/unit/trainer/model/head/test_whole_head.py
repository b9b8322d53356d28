"""Logits of the whole vocabulary are those whose log-probabilities the head returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.trainer.model.head.fused_head import FusedHead
from lockstep.trainer.model.head.logit_tiles import TILE_K, LogitTransform
from lockstep.trainer.model.head.whole_head import whole_logits, whole_scores

VOCAB, WIDTH, ROWS = TILE_K + 100, 32, 5
TRANSFORMS = (
    LogitTransform(),
    LogitTransform(softcap=3.0, scale=0.5),
    LogitTransform(temperature=0.7, scale=2.0),
)


def head(*, bias: bool) -> FusedHead:
    torch.manual_seed(0)
    return FusedHead(nn.Linear(WIDTH, VOCAB, bias=bias))


def policy(head: FusedHead) -> Any:
    return SimpleNamespace(causal_lm=SimpleNamespace(get_output_embeddings=lambda: head))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("autocasts", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_every_token_has_the_logprob_that_the_head_returns(
    transform: LogitTransform, autocasts: bool, bias: bool
) -> None:
    fused, states = head(bias=bias), 4 * torch.randn(ROWS, WIDTH)
    ids = torch.arange(0, VOCAB, 97)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocasts),
        whole_logits(policy(fused)) as heard,
    ):
        logprobs = [fused(states, token.expand(ROWS), transform=transform)[0] for token in ids]
    assert len(heard) == len(ids)
    assert heard[0].shape == (ROWS, VOCAB)
    expected = torch.stack(logprobs, 1)
    torch.testing.assert_close(heard[0].log_softmax(1)[:, ids], expected, rtol=1e-5, atol=1e-5)


def test_scores_are_those_of_the_last_pass_and_the_hook_is_gone() -> None:
    fused = head(bias=False)

    def passes(ids: list[int], error: float) -> None:
        for factor in (0.0, error):
            fused(factor * torch.ones(1, WIDTH), torch.tensor(ids[1:]))

    found = whole_scores(policy(fused), passes, [0, 1], 2.0)  # type: ignore[arg-type]
    torch.testing.assert_close(found, 2.0 * fused.weight.sum(1)[None])
    assert not fused._forward_pre_hooks
