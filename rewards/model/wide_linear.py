"""Linear layer that computes in float32 or wider, also under autocast and with weights in half precision.

For values and scores: returns and advantages are sums and differences of them, which half precision rounds away.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class WideLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(torch.promote_types(input.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.to(wide), self.weight.to(wide), bias)


def widen(linear: nn.Linear) -> None:
    """Make a linear layer a `WideLinear`, in place: its parameters stay the same objects, also those of ZeRO-3."""
    assert type(linear) in (nn.Linear, WideLinear), (
        f"found {type(linear).__name__}, whose forward is not that of a Linear"
    )
    linear.__class__ = WideLinear
