"""Time saved by computing the prompt of a group once: whole steps with and without `share_prefixes`.

    python benchmarks/prefixes.py [--prompts 64 256 1024] [--group 8] [--sampled 128] [--hidden 256] [--layers 4]

Each point is a whole `Trainer.step` on prepared rollouts (as in benchmarks/update.py), in CPU time, or on a GPU in wall
time; the sides take turns. `tokens` is the share of the rows' tokens that is still computed, and so about the lower
bound of the time. `gradient_difference` is the relative difference of the sides' gradient norms.
"""

from __future__ import annotations

import copy

import torch
from harness.device import clock
from harness.models import small_qwen3
from harness.results import argument_parser, interleaved, report
from harness.steps import make_rollouts, trainer_step

from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.observe.step_metrics import StepReport


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 1024], help="tokens per prompt")
    parser.add_argument("--sampled", type=int, default=128, help="median of the sampled tokens of a row")
    parser.add_argument("--sigma", type=float, default=0.8, help="standard deviation of the log of that length")
    parser.add_argument("--group", type=int, default=8, help="rows per prompt")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a packed microbatch")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the computation")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.sampled, args.groups, args.hidden, args.layers, args.vocab = [64], 16, 2, 64, 2, 512
        args.repeats = 1
    torch.set_num_threads(1)
    model = small_qwen3(hidden=args.hidden, layers=args.layers, vocab=args.vocab, max_positions=32768)
    rows, differences = [], []
    for prompt in args.prompts:
        rollouts = make_rollouts(
            rows=args.group * args.groups,
            median=args.sampled,
            sigma=args.sigma,
            vocab=args.vocab,
            longest=8 * args.sampled,
            group=args.group,
            prompt=prompt,
        )
        sides = {}
        for share in ("never", "always"):
            config = Config(token_budget=args.budget, optimizer=OptimizerConfig(lr=1e-6), share_prefixes=share)
            config.correction.noise_floor_every = 0
            config.model.dtype = args.dtype
            sides[share] = trainer_step(Policy(copy.deepcopy(model), compute_dtype=args.dtype), config, rollouts)
        first: dict[str, StepReport] = {share: step() for share, step in sides.items()}
        seconds = interleaved(sides, repeats=args.repeats, clock=clock)
        apart, shared = min(seconds["never"]), min(seconds["always"])
        metrics = first["always"].metrics
        differences.append(abs(metrics["optim/grad_norm"] / first["never"].metrics["optim/grad_norm"] - 1))
        rows.append(
            {
                "prompt": prompt,
                "apart, s": apart,
                "shared, s": shared,
                "apart / shared": apart / shared,
                "tokens": 1 - metrics["perf/shared_tokens_frac"],
            }
        )
    numbers = {"gain": rows[-1]["apart / shared"], "gradient_difference": max(differences)}
    report("prefixes", rows, numbers, as_json=args.json, details={"group": args.group, "sampled": args.sampled})


if __name__ == "__main__":
    main()
