"""Trained tokens per second with packed rows, compared with right-padded batches, on log-normal row lengths.

    python benchmarks/packing.py [--rows 64] [--median 120] [--sigma 0.8] [--hidden 128] [--layers 2] [--dtype bfloat16]

Both sides run forward and backward with the same model, rows, loss and token budget per microbatch, padding included.
The "padded" side takes rows in order, as many as fit when padded to the longest of them, and transformers' SDPA with
the padding mask. Its targets go through the same fused head, so that only packing differs. Also printed: the ratio of
microbatches, and the share of real tokens.

`--attention` belongs to the packed side; on a GPU in bfloat16 the trainer chooses FlashAttention's varlen kernel (not
run yet):

    python benchmarks/packing.py --dtype bfloat16 --hidden 1024 --layers 28 --vocab 151936 --median 1500 --budget 16384

On a CPU the clock is the process's CPU time. Not measured: gradient checkpointing.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import numpy as np
import torch
from harness.device import DEVICE, autocast, clock
from harness.models import small_qwen3
from harness.results import argument_parser, interleaved, report

from lockstep.rollout.records import TrainingRow
from lockstep.trainer.batch.assignment import plan
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.config.groups.model_settings import ATTENTIONS
from lockstep.trainer.model.head.fused_head import fused_logprobs
from lockstep.trainer.model.policy import Policy


def training_rows(args: argparse.Namespace) -> list[TrainingRow]:
    """Make rows of log-normal length whose second half is trained."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(args.median), args.sigma, args.rows), 8, args.budget).astype(int)
    rows = []
    for length in lengths:
        mask = np.arange(length) >= length // 2
        rows.append(
            TrainingRow(
                ids=rng.integers(0, args.vocab, length),
                loss_mask=mask,
                sampling_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turns=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return rows


def packed_step(policy: Policy, rows: list[TrainingRow], budget: int) -> int:
    """Pass over all rows in packs; return the number of microbatches."""
    result = plan([len(row) for row in rows], num_ranks=1, token_budget=budget)
    for indices in result.microbatches[0]:
        logp_T, _ = policy(collate(rows, indices, device=DEVICE), with_entropy=False)
        logp_T.sum().backward()
    return result.num_microbatches


def padded_batches(rows: list[TrainingRow], budget: int) -> list[list[TrainingRow]]:
    batches: list[list[TrainingRow]] = [[]]
    for row in rows:
        if batches[-1] and (len(batches[-1]) + 1) * max(len(row), *map(len, batches[-1])) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def padded_step(policy: Policy, rows: list[TrainingRow], budget: int) -> int:
    """Pass over all rows in right-padded batches; return the number of microbatches."""
    batches = padded_batches(rows, budget)
    for batch in batches:
        longest = max(map(len, batch))
        ids, mask, loss_mask = (torch.zeros(len(batch), longest, dtype=torch.int64) for _ in range(3))
        for index, row in enumerate(batch):
            ids[index, : len(row)] = torch.from_numpy(row.ids)
            mask[index, : len(row)] = 1
            loss_mask[index, : len(row)] = torch.from_numpy(row.loss_mask)
        ids, mask, loss_mask = ids.to(DEVICE), mask.to(DEVICE), loss_mask.to(DEVICE)
        hidden = policy.causal_lm.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        where = loss_mask[:, 1:].bool()
        weight = policy.causal_lm.get_parameter("lm_head.weight")
        logp_T, _ = fused_logprobs(
            hidden[:, :-1][where],
            weight,
            ids[:, 1:][where],
            with_entropy=False,
        )
        logp_T.sum().backward()
    return len(batches)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--median", type=float, default=120)
    parser.add_argument("--sigma", type=float, default=0.8, help="standard deviation of log length")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a microbatch")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the computation")
    parser.add_argument("--attention", choices=ATTENTIONS, default="auto", help="attention of the packed side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.median, args.repeats = 8, 40, 1
    torch.set_num_threads(args.threads)
    rows = training_rows(args)
    tokens, trained_tokens = sum(map(len, rows)), sum(row.num_trained for row in rows)
    model = small_qwen3(hidden=args.hidden, layers=args.layers, vocab=args.vocab)

    def policy(attention: str) -> Policy:
        return Policy(copy.deepcopy(model), attn_implementation=attention, compute_dtype=args.dtype).to(DEVICE)

    gradients: dict[str, torch.Tensor] = {}
    microbatches: dict[str, int] = {}

    def side(name: str, policy: Policy, step: Callable[[Policy, list[TrainingRow], int], int]) -> Callable[[], None]:
        def run() -> None:
            policy.zero_grad()
            with autocast(args.dtype):
                microbatches[name] = step(policy, rows, args.budget)
            gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

        return run

    seconds = interleaved(
        {
            "padded": side("padded", policy("sdpa"), padded_step),
            "packed": side("packed", policy(args.attention), packed_step),
        },
        repeats=args.repeats,
        clock=clock,
    )
    padded_tokens = sum(len(batch) * max(map(len, batch)) for batch in padded_batches(rows, args.budget))
    table = [
        {
            "side": name,
            "microbatches": microbatches[name],
            "real tokens": tokens / (padded_tokens if name == "padded" else tokens),
            "trained tokens/s": trained_tokens / min(times),
        }
        for name, times in seconds.items()
    ]
    error = float((gradients["packed"] - gradients["padded"]).norm() / gradients["padded"].norm())
    numbers = {"ratio": min(seconds["padded"]) / min(seconds["packed"]), "gradient_difference": error}
    report("packing", table, numbers, as_json=args.json, details={"rows": args.rows, "tokens": tokens})


if __name__ == "__main__":
    main()
