"""Models with published settings: packed rows have the scores and gradients of each row alone in plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.model.policy import Policy
from scripts.published.models import plain_model
from tests.fixtures.published import ORIGINAL, PUBLISHED, save_published

LENGTHS = (100, 5, ORIGINAL, 17, ORIGINAL + 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_packed_rows_have_the_scores_and_gradients_of_each_row_alone(name: str, tmp_path: Path) -> None:
    path = save_published(name, tmp_path)
    policy = Policy.from_pretrained(path, gradient_checkpointing=True)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 500, (length,), generator=generator) for length in LENGTHS]
    found, _ = policy(collate([whole_row(row.tolist()) for row in rows], range(len(rows))), with_entropy=False)
    found.sum().backward()
    start = 0
    gradient: dict[str, torch.Tensor] = {}
    for row in rows:
        plain = plain_model(path)
        alone = torch.log_softmax(plain(row[None]).logits[0, :-1], -1).gather(1, row[1:, None])[:, 0]
        torch.testing.assert_close(found[start : start + len(alone)], alone, rtol=1e-4, atol=1e-4)
        start += len(alone)
        alone.sum().backward()
        for parameter, tensor in plain.named_parameters():
            if tensor.grad is not None:
                gradient[parameter] = gradient.get(parameter, torch.zeros(())) + tensor.grad
    for parameter, tensor in policy.model.named_parameters():
        if parameter not in gradient and "bias" in parameter:  # of a router, which only chooses
            continue
        assert tensor.grad is not None, parameter
        assert (tensor.grad - gradient[parameter]).norm() <= 1e-3 * gradient[parameter].norm(), parameter
