"""Products of adapters on a CPU. With an engine: tests/integration/test_adapters.py."""

from __future__ import annotations

import pytest
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lockstep.rollout.engine.plugin import register
from lockstep.rollout.engine.repairs.cpu_lora import by_slot

INPUTS, RANK, SIZES, SLOTS = 6, 2, (4, 3), 3


@pytest.mark.parametrize("ids", [(7, 7, 7), (0, 7, 0), (7, 9, 0), (0, 0, 0), (9, 7, 9)])
def test_each_token_gets_the_change_of_its_adapter(ids: tuple[int, ...]) -> None:
    """ids: of the adapters of three requests; 0: the base."""
    register()
    generator = torch.Generator().manual_seed(0)
    a = [torch.randn(SLOTS, 1, RANK, INPUTS, generator=generator) for _ in SIZES]
    b = [torch.randn(SLOTS, 1, size, RANK, generator=generator) for size in SIZES]
    counts = (2, 1, 3)
    tokens = tuple(one for one, count in zip(ids, counts, strict=True) for _ in range(count))
    wrapper = PunicaWrapperCPU(64, 8, torch.device("cpu"))
    wrapper.update_metadata(LoRAMapping(tokens, ids, is_prefill=True), [7, None, 9], SLOTS + 1, 100)
    x, y = torch.randn(len(tokens), INPUTS, generator=generator), torch.zeros(len(tokens), sum(SIZES))
    wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 0.5, SIZES)

    for row, one in enumerate(tokens):
        slot = {7: 0, 9: 2}.get(one)
        changes = [
            torch.zeros(size) if slot is None else 0.5 * (part_b[slot, 0] @ (part_a[slot, 0] @ x[row]))
            for part_a, part_b, size in zip(a, b, SIZES, strict=True)
        ]
        torch.testing.assert_close(y[row], torch.cat(changes), msg=f"token {row} of adapter {one}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_change_of_a_token_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    register()
    generator = torch.Generator().manual_seed(0)
    inputs, size, num_tokens = 64, 96, 40
    a = torch.randn(1, 1, 8, inputs, generator=generator).to(dtype)
    b = torch.randn(1, 1, size, 8, generator=generator).to(dtype)
    x = torch.randn(num_tokens, inputs, generator=generator).to(dtype)

    def changes(num: int, bases: int = 0) -> torch.Tensor:
        """Return the changes of the first tokens, after `bases` tokens without an adapter."""
        ids = (0,) * bases + (7,) * num
        wrapper = PunicaWrapperCPU(64, 64, torch.device("cpu"))
        wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [7], 2, 100)
        y = torch.zeros(len(ids), size, dtype=dtype)
        wrapper.add_lora_linear(y, torch.cat([x[:bases], x[:num]]), (a,), (b,), 1.0, (size,))
        return y[bases:]

    whole = changes(num_tokens)
    for num in range(1, num_tokens):
        assert changes(num).equal(whole[:num]), f"{num} tokens in the batch"
        assert changes(num, bases=3).equal(whole[:num]), f"{num} tokens in a batch with others"


def test_tokens_are_grouped_by_slot() -> None:
    assert by_slot(torch.tensor([1, 1])) == [(1, None)]
    assert by_slot(torch.tensor([-1, -1])) == []
    ((slot, rows),) = by_slot(torch.tensor([-1, 2, 2]))
    assert (slot, rows.tolist() if rows is not None else None) == (2, [1, 2])
