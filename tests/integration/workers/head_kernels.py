"""Checks of the head's kernels in Triton's interpreter, on a GPU that computes on the CPU.

    TRITON_INTERPRET=1 python -m tests.integration.workers.head_kernels OUTPUT

Started by tests/integration/test_head_kernels.py: the stub of the GPU is loaded before torch, and Triton reads its
variable when it is imported. OUTPUT gets a list of what each case measured, against the definition in float64.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fixtures.fake_gpu import fake_gpu, load_stub

N, D, V, E = 11, 32, 200, 5
TILE, TOKENS = 128, 5
"""Vocabulary entries of a tile and tokens of a chunk; no multiples of either."""
MASKED = slice(3, 6)
"""Tokens without a gradient."""


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    dtype: str = "float32"
    temperature: float = 0.7
    scale: float = 1.3
    softcap: float | None = None
    bias: bool = False
    entropy: bool = True
    candidates: bool = False
    support: bool = False


CASES = [
    Case(name=f"{name}, {dtype}", dtype=dtype, **settings)
    for dtype in ("float32", "bfloat16")
    for name, settings in {
        "no entropy": {"entropy": False, "temperature": 1.0, "scale": 1.0},
        "entropy": {},
        "softcap and bias": {"softcap": 5.0, "bias": True},
        "candidates": {"candidates": True},
        "candidates, all settings": {"candidates": True, "softcap": 5.0, "bias": True},
        "support": {"support": True, "softcap": 5.0, "bias": True},
    }.items()
]


def main(output: Path) -> None:
    load_stub()
    output.write_text(json.dumps([{**asdict(case), **measure(case)} for case in CASES]), encoding="utf-8")


def measure(case: Case) -> dict[str, Any]:
    """Return errors of values (largest) and of gradients (relative norm), passes over logits, products and syncs."""
    import torch

    from benchmarks.harness.passes import counted_kernels
    from lockstep.trainer.model.head import logit_tiles
    from lockstep.trainer.model.head.fused_head import fused_candidates, fused_logprobs
    from lockstep.trainer.model.head.logit_tiles import LogitTransform

    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (N, D), "weight": (V, D), "bias": (V,)}
    values = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    values["weight"] *= 0.4
    if not case.bias:
        del values["bias"]
    target_ids = torch.randint(V, (N,), generator=generator)
    ids = torch.stack([torch.randperm(V, generator=generator)[:E] for _ in range(N)])
    ids[::2, 0] = target_ids[::2]
    ids[::2, 1:] = (target_ids[::2, None] + torch.arange(1, E)) % V
    sizes = torch.arange(N) % E + 1  # of supports, which begin with the target
    supports = torch.cat([target_ids[:, None], (target_ids[:, None] + torch.arange(1, E)) % V], 1)
    upstream = torch.randn(N, 2 + E + 1, generator=generator)
    upstream[MASKED] = 0
    transform = LogitTransform(temperature=case.temperature, scale=case.scale, softcap=case.softcap)

    def loss(logprob: Any, entropy: Any, table: Any, upstream: Any) -> Any:
        total = (logprob * upstream[:, 0]).sum()
        if case.entropy:
            total = total + (entropy * upstream[:, 1]).sum()
        return total + (table * upstream[:, 2:]).sum() if case.candidates else total

    exact = {name: value.double().requires_grad_() for name, value in values.items()}
    kept = torch.zeros(N, V, dtype=torch.bool).scatter_(1, supports, torch.arange(E) < sizes[:, None])
    expected = defined(exact, target_ids, ids, kept if case.support else None, transform)
    loss(*expected, upstream.double()).backward()

    per_logit = 4 if case.dtype == "float32" else 6
    with (
        mock.patch.object(logit_tiles, "TILE_K", TILE),
        mock.patch.object(logit_tiles, "LOGITS_BUDGET_GIB", per_logit * TILE * TOKENS / 2**30),
        fake_gpu() as record,
        counted_kernels(4 * N * V, block=TILE) as passes,
    ):
        own = {name: value.to("cuda").requires_grad_() for name, value in values.items()}
        on_gpu = [one.to("cuda") for one in (target_ids, ids, upstream)]
        offsets, support_ids = (
            torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            supports[torch.arange(E) < sizes[:, None]],
        )
        support = (offsets.to("cuda"), support_ids.to("cuda"))
        settings = {"bias_V": own.get("bias"), "transform": transform, "with_entropy": case.entropy}
        args = (own["hidden"], own["weight"], on_gpu[0])
        record.clear()
        if case.candidates:
            found = fused_candidates(*args, on_gpu[1], **settings)
        else:
            found = (*fused_logprobs(*args, **settings, support=support if case.support else None), None)
        forward, passes_forward = record.num_syncs, passes.pop()
        loss(*found, on_gpu[2]).backward()
        passes_backward, syncs = passes.pop(), dict(record.syncs)
        backward = record.num_syncs - forward
        products = sorted({dtype for _, dtype in record.products})
        found = [None if one is None else one.detach().cpu().double() for one in found]
        gradients = {name: value.grad.cpu().double() for name, value in own.items()}
    logprob, entropy, table = found
    differences = {"logprob": (logprob - expected[0]).abs().max().item()}
    if case.entropy:
        differences["entropy"] = (entropy - expected[1]).abs().max().item()
    if case.candidates:
        differences["table"] = (table - expected[2]).abs().max().item()
    of_gradients = {
        name: ((gradients[name] - value.grad).norm() / value.grad.norm()).item() for name, value in exact.items()
    }
    return {
        "differences": differences,
        "gradients": of_gradients,
        "masked": gradients["hidden"][MASKED].abs().max().item(),
        "passes": [passes_forward, passes_backward],
        "syncs": [forward, backward],
        "lines": syncs,
        "products": products,
    }


def defined(x: dict[str, Any], target_ids: Any, ids: Any, kept: Any, transform: Any) -> tuple[Any, Any, Any]:
    """Return logprobs, entropy, and logprobs of candidates and of all others, by the definition."""
    import torch

    logits = torch.nn.functional.linear(x["hidden"], x["weight"], x.get("bias")) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logits = logits / transform.temperature
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    logp = logits.log_softmax(1)
    finite = logp if kept is None else logp.masked_fill(~kept, 0)
    others = logp.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return (
        logp.gather(1, target_ids[:, None])[:, 0],
        -(logp.exp() * finite).sum(1),
        torch.cat([logp.gather(1, ids), others], 1),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
