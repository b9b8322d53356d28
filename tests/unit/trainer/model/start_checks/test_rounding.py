"""Rounding errors that are added to the outputs of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.trainer.batch.packing import collate, whole_row
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.start_checks.rounding import marked_layers, rounding_errors
from tests.fixtures.families import FAMILIES, save_family
from tests.fixtures.models import VOCAB_SIZE


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_change_scores_by_their_size(family: str, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(save_family(family, tmp_path))
    row = whole_row(torch.randint(VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(0)).tolist())

    def scores(size: float) -> torch.Tensor:
        with torch.no_grad(), rounding_errors(policy, size):
            return policy(collate([row], [0]), with_entropy=False)[0]

    plain = scores(0.0)
    medians = [(scores(size) - plain).abs().median().item() for size in (1e-3, 1e-2)]
    assert 0 < medians[0] < 0.1
    assert 3 < medians[1] / medians[0] < 30
    assert torch.equal(scores(1e-2), scores(1e-2))
    assert torch.equal(scores(0.0), plain), "nothing stays behind"
    assert len(marked_layers(policy)) == policy.causal_lm.config.get_text_config().num_hidden_layers
