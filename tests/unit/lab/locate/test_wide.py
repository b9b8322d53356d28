"""Float64 where a model asks for float32."""

from __future__ import annotations

import torch

from lockstep.lab.locate.wide import Wide


def test_float32_becomes_float64_wherever_it_is_asked_for() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with Wide():
        results = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), torch.softmax(x, -1, dtype=torch.float32)]
    assert {one.dtype for one in results} == {torch.float64}
    assert x.float().dtype is torch.float32, "outside of the block nothing changes"


def test_other_dtypes_stay() -> None:
    with Wide():
        assert torch.ones(3).to(torch.bfloat16).dtype is torch.bfloat16
