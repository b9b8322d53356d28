"""What an update is said to compute is what torch counts."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.fixtures.models import tiny_qwen3
from trainer.model.flops import update_flops
from trainer.model.memory_plan import ModelShape

LENGTHS = (24, 40)


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_is_what_torch_counts(tied: bool) -> None:
    model = tiny_qwen3(tied=tied)
    model.set_attn_implementation("eager")  # its products are counted, those of the fused kernel on CPU are not
    with FlopCounterMode(display=False) as counter:
        for length in LENGTHS:
            model(torch.randint(0, 100, (1, length))).logits.sum().backward()
    shape = ModelShape.of(model, model, model.config)
    # Eager attention multiplies what the mask takes away, too: that half is not needed, and not in our count.
    masked = 6.0 * shape.layers * shape.attention * sum(length**2 for length in LENGTHS)
    assert update_flops(shape, LENGTHS) == pytest.approx(counter.get_total_flops() - masked, rel=0.02)


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    model = tiny_qwen3(tied=True)
    shape = ModelShape.of(model, model, model.config)
    frozen = dataclasses.replace(shape, trained=0)
    assert update_flops(shape, LENGTHS) - update_flops(frozen, LENGTHS) == 2.0 * shape.parameters * sum(LENGTHS)
