"""Time and peak memory of the fused LM head against full logits, forward and backward, as ratios.

    python benchmarks/head.py [--tokens 8192] [--vocab 151936] [--hidden 1024] [--threads 1] [--entropy]

Each side runs in a process of its own, because the peak memory of a process never decreases. Memory is counted without
inputs and their gradients. The "full" side does the work of a trainer without a fused head: one matrix product,
log-softmax, gather, and with `--entropy` the entropy.

On a CPU the clock is the process's CPU time, which other processes disturb less than wall time.

Not measured: the decoder; bfloat16 on GPUs unless the benchmark runs there.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import torch
from harness.device import DEVICE, clock
from harness.results import argument_parser, report

from lockstep.trainer.model.head.fused_head import fused_logprobs
from lockstep.trainer.model.head.logit_tiles import LogitTransform

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
    function = {"full": full, "fused": fused}[args.side]
    forward, total = [], []
    for _ in range(args.repeats):
        start = clock()
        logp, entropy = function(hidden, weight, targets, args.entropy)
        forward.append(clock() - start)
        (logp.sum() + 0.01 * entropy.sum()).backward()
        total.append(clock() - start)
    peak = (peak_bytes() - before) / 2**30
    return {"forward_s": min(forward), "total_s": min(total), "peak_gib": peak}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--entropy", action="store_true", help="also compute the entropy and its gradient")
    parser.add_argument("--side", choices=["full", "fused"], help="measure one side in this process (for internal use)")
    args = parser.parse_args()
    if args.quick:
        args.vocab, args.tokens, args.hidden, args.repeats = 8192, 256, 64, 1
    if args.side:
        print(json.dumps(measure(args)))
        return
    results = {}
    for side in ("full", "fused"):
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        results[side] = json.loads(output.stdout)
    ratios = {
        f"{name.rpartition('_')[0]}_ratio": results["fused"][name] / results["full"][name] for name in results["full"]
    }
    shape = {"tokens": args.tokens, "vocabulary": args.vocab, "hidden": args.hidden, "entropy": args.entropy}
    report(
        "head", [{"side": side, **result} for side, result in results.items()], ratios, as_json=args.json, details=shape
    )


if __name__ == "__main__":
    main()
