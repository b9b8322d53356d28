"""Time and peak memory of the fused LM head against full logits, forward and backward, as ratios; passes over logits.

    python benchmarks/head.py [--tokens 8192] [--vocab 151936] [--hidden 1024] [--threads 1] [--entropy]
    python benchmarks/head.py --passes

Each side runs in a process of its own, because the peak memory of a process never decreases. Memory is counted without
inputs and their gradients. The "full" side does the work of a trainer without a fused head: one matrix product,
log-softmax, gather, and with `--entropy` the entropy.

On a CPU the clock is the process's CPU time, which other processes disturb less than wall time.

On a GPU two more sides run. "chain" is the fused head with torch's operations in the place of its kernels. "liger" is
`LigerFusedLinearCrossEntropyLoss` with sums in float32, if `liger_kernel` is installed, which nothing here needs. It
does less: no entropy, no temperature. The trainer does not use it because its logits are in half precision, which
costs 0.04 in log π, and it knows neither candidates nor a sampling support per token; Liger's kernel with entropy also
rounds the weight's gradient to bfloat16 every 1,024 tokens.

`--passes` counts how often a tile of float32 logits is read or written, with bfloat16 operands as on a GPU: by torch's
operations, and by the kernels in Triton's interpreter. No GPU is needed.

Not measured: the decoder; bfloat16 on GPUs unless the benchmark runs there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
from typing import Any
from unittest import mock

import torch
from harness.device import DEVICE, clock
from harness.passes import counted_kernels, counted_operations
from harness.results import argument_parser, report

from lockstep.trainer.model.head.fused_head import fused_logprobs
from lockstep.trainer.model.head.logit_tiles import TILE_K, Gradients, LogitTiles, LogitTransform, Sums

TEMPERATURE = 0.7


def full(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute with materialized logits."""
    logp = torch.log_softmax((hidden @ weight.T).float() / TEMPERATURE, -1)
    entropy = -(logp.exp() * logp).sum(-1) if with_entropy else torch.zeros(len(targets), device=hidden.device)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def fused(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    transform = LogitTransform(temperature=TEMPERATURE)
    return fused_logprobs(hidden, weight, targets, transform=transform, with_entropy=with_entropy)


def chain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute as `fused`, without kernels in the forward pass; `measure` leaves them out of the backward pass."""
    return fused(hidden, weight, targets, with_entropy)


def liger(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
        reduction="sum", accum_dtype=torch.float32
    )
    return -loss(weight, hidden, targets), torch.zeros((), device=hidden.device)


SIDES = {"full": full, "fused": fused, "chain": chain, "liger": liger}


def peak_bytes() -> int:
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Measure one side: best time of the repeats [s], and peak memory without inputs and gradients [GiB]."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    weight = (torch.randn(args.vocab, args.hidden, device=DEVICE) * 0.05).to(dtype).requires_grad_()
    hidden = torch.randn(args.tokens, args.hidden, device=DEVICE).to(dtype).requires_grad_()
    targets = torch.randint(args.vocab, (args.tokens,), device=DEVICE)
    weight.grad, hidden.grad = torch.ones_like(weight), torch.ones_like(hidden)
    before = peak_bytes()
    function = SIDES[args.side]
    forward, total = [], []
    without = mock.patch.object(LogitTiles, "uses_kernels", False)
    with without if args.side == "chain" else contextlib.nullcontext():
        for _ in range(args.repeats):
            start = clock()
            logp, entropy = function(hidden, weight, targets, args.entropy)
            forward.append(clock() - start)
            (logp.sum() + 0.01 * entropy.sum()).backward()
            total.append(clock() - start)
    peak = (peak_bytes() - before) / 2**30
    return {"forward_s": min(forward), "total_s": min(total), "peak_gib": peak}


def passes() -> list[dict[str, Any]]:
    """Count the passes of one tile, forward and backward, for torch's operations and for the kernels."""
    from lockstep.trainer.model.head import logit_chain, logit_kernels

    tokens, hidden, unit = 8, 16, 4 * 8 * TILE_K
    numbers = torch.rand(6, tokens)
    target_ids = torch.arange(tokens)
    table = torch.stack([torch.randperm(TILE_K)[:20] for _ in range(tokens)])
    cases = {
        "log-probability": (LogitTransform(temperature=TEMPERATURE), False, None),
        "and entropy": (LogitTransform(temperature=TEMPERATURE), True, None),
        "and softcap": (LogitTransform(temperature=TEMPERATURE, softcap=30.0), True, None),
        "entropy, 20 candidates": (LogitTransform(temperature=TEMPERATURE), True, table),
    }
    rows = []
    for name, (transform, with_entropy, ids) in cases.items():
        row: dict[str, Any] = {"computed": name}
        tiles = LogitTiles(torch.zeros(tokens, hidden), torch.zeros(TILE_K, hidden), None, transform, None)
        tiles.operand_dtype, tiles.in_product, tiles.inner = torch.bfloat16, 1.0, transform.inner  # as on a GPU
        tile, sums = tiles.tiles[0], Sums.zeros(target_ids, ids, torch.float32)
        rows_of = Gradients(
            target_ids_N=target_ids,
            candidate_ids_NE=ids,
            lse_N=numbers[0],
            entropy_N=numbers[1],
            common_N=numbers[2],
            grad_logprob_N=numbers[3],
            grad_entropy_N=numbers[4] if with_entropy else None,
            candidate_dz_NE=None if ids is None else torch.rand(ids.shape),
        )
        for side, arithmetic, counted in (
            ("torch", logit_chain, counted_operations(unit, tile=tokens * TILE_K)),
            ("kernels", logit_kernels, counted_kernels(unit, block=tokens * 32)),
        ):
            tiles._buffers.clear()
            with counted as passed:
                arithmetic.statistics(tiles, tile, torch.randn(tokens, TILE_K), sums, with_entropy=with_entropy)
                forward = passed.pop()
                tiles.operand(arithmetic.gradient(tiles, tile, torch.randn(tokens, TILE_K), rows_of))
                backward = passed.pop()
            for phase, of_kinds in (("forward", forward), ("backward", backward)):
                row[f"{side} {phase}"] = round(sum(n for kind, n in of_kinds.items() if kind != "randn"), 2)
        rows.append(row)
    return rows


def run_side(side: str, **environment: str) -> Any:
    """Return what a process of its own measures."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment})
    return json.loads(output.stdout)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--entropy", action="store_true", help="also compute the entropy and its gradient")
    parser.add_argument("--passes", action="store_true", help="count passes over logits instead")
    parser.add_argument(
        "--side", choices=[*SIDES, "passes"], help="measure one side in this process (for internal use)"
    )
    args = parser.parse_args()
    if args.quick:
        args.vocab, args.tokens, args.hidden, args.repeats = 8192, 256, 64, 1
    if args.side:
        print(json.dumps(passes() if args.side == "passes" else measure(args)))
        return
    if args.passes:
        report("head_passes", run_side("passes", TRITON_INTERPRET="1"), {}, as_json=args.json)
        return
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    if not has_liger or DEVICE != "cuda":
        print(f"without Liger: {'its kernels need a GPU' if has_liger else 'liger_kernel is not installed'}")
    sides = ["full", "fused", *(["chain", *["liger"] * has_liger] if DEVICE == "cuda" else [])]
    results = {side: run_side(side) for side in sides}
    ratios = {
        f"{name.rpartition('_')[0]}_ratio": results["fused"][name] / results["full"][name] for name in results["full"]
    }
    shape = {"tokens": args.tokens, "vocabulary": args.vocab, "hidden": args.hidden, "entropy": args.entropy}
    report(
        "head", [{"side": side, **result} for side, result in results.items()], ratios, as_json=args.json, details=shape
    )


if __name__ == "__main__":
    main()
