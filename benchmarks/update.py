"""Overhead of a training step without an engine, compared with a lower bound and with TRL's loss.

    python benchmarks/update.py [--rows 64] [--median 120] [--hidden 256] [--layers 4] [--vocab 4096] [--threads 1]

    bound      the model's own decoder over the same packs, full logits of the trained tokens, backward, clip, AdamW
    lockstep   `Trainer.step` on prepared rollouts without engine and sync: rows, packing, scores, correction, loss,
               backward, clip, AdamW, metrics
    trl        `GRPOTrainer.compute_loss` of TRL 1.16 on the same rollouts, padded, in microbatches of `--micro-batch`
               rows, backward, clip, AdamW; without the pass for old logprobs that it makes when vLLM samples

The goal is an `overhead` (time of lockstep over the bound, less 1) of at most 0.1. Rows have log-normal lengths, and
half of each is trained. On a CPU the clock is the CPU time of the process.

On a GPU, with 1.7 B parameters in bfloat16 and the model FLOPs utilization (`mfu`, goal 0.5; not run yet):

    python benchmarks/update.py --dtype bfloat16 --hidden 2048 --layers 28 --vocab 151936 --median 1500 --rows 64 \
        --budget 16384 --micro-batch 4 --peak-tflops 989
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from harness.device import DEVICE, autocast, clock
from harness.models import small_qwen3
from harness.results import argument_parser, interleaved, report
from harness.steps import make_rollouts, trainer_step

from lockstep.demo.tokenizer import untrained
from lockstep.trainer.batch.assignment import plan
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.shape import ModelShape, update_flops
from lockstep.trainer.update.optimizers.optimizer import make_optimizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def bound(policy: Policy, batch: StepBatch, config: Config) -> Callable[[], None]:
    """Return the least work of a packed update: prepared packs, and a dot product as the loss."""
    optimizer = make_optimizer(policy, config.optimizer)
    packs = [
        collate(batch.rows, indices, batch.layout, device=DEVICE)
        for indices in plan(
            [len(row) for row in batch.rows], num_ranks=1, token_budget=config.pack_tokens
        ).microbatches[0]
    ]
    head = policy.causal_lm.get_output_embeddings()

    def step() -> None:
        for pack in packs:
            with autocast(config.model.dtype):
                hidden = policy.hidden_states(pack)
                logits = head(hidden[pack.target_index_T])
            logp = logits.float().log_softmax(-1).gather(1, pack.target_ids_T[:, None])
            (logp.sum() / batch.layout.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trl(model: Any, batch: StepBatch, config: Config, *, micro_batch: int, output: str) -> Callable[[], None]:
    """Return an update with TRL's loss on the same rows, padded to the longest prompt and completion as TRL does."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    num_rows = len(batch.rows)
    arguments = GRPOConfig(
        output_dir=output,
        loss_type="dapo",
        epsilon_high=0.28,
        num_generations=4,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_rows // micro_batch,
        gradient_checkpointing=False,
        bf16=config.model.dtype == "bfloat16",
        use_cpu=DEVICE == "cpu",
        report_to="none",
    )
    peer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * num_rows),
        processing_class=untrained(),
    )
    peer.current_gradient_accumulation_steps = num_rows // micro_batch
    peer.model.train()
    optimizer = make_optimizer(peer.model, config.optimizer)
    inputs = {name: tensor.to(DEVICE) for name, tensor in padded(batch).items()}

    def step() -> None:
        for start in range(0, num_rows, micro_batch):
            part = {name: value[start : start + micro_batch] for name, value in inputs.items()}
            part["num_items_in_batch"] = inputs["completion_mask"].sum()
            peer.compute_loss(peer.model, part).backward()
        torch.nn.utils.clip_grad_norm_(peer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def padded(batch: StepBatch) -> dict[str, torch.Tensor]:
    """Return the rows as TRL's tensors: prompts padded on the left, completions on the right."""
    counts = [row.num_trained for row in batch.rows]
    longest_prompt = max(len(row) - count for row, count in zip(batch.rows, counts, strict=True))
    longest_completion = max(counts)
    tensors = {
        "prompt_ids": torch.zeros(len(counts), longest_prompt, dtype=torch.long),
        "prompt_mask": torch.zeros(len(counts), longest_prompt, dtype=torch.long),
        "completion_ids": torch.zeros(len(counts), longest_completion, dtype=torch.long),
        "completion_mask": torch.zeros(len(counts), longest_completion, dtype=torch.long),
    }
    for index, (row, count) in enumerate(zip(batch.rows, counts, strict=True)):
        ids = torch.from_numpy(row.ids)
        prompt = len(ids) - count
        tensors["prompt_ids"][index, longest_prompt - prompt :] = ids[:prompt]
        tensors["prompt_mask"][index, longest_prompt - prompt :] = 1
        tensors["completion_ids"][index, :count] = ids[prompt:]
        tensors["completion_mask"][index, :count] = 1
    return {**tensors, "advantages": torch.randn(len(counts), generator=torch.Generator().manual_seed(0))}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--median", type=float, default=120, help="median of the row lengths")
    parser.add_argument("--sigma", type=float, default=0.8, help="standard deviation of log length")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a packed microbatch")
    parser.add_argument("--micro-batch", type=int, default=16, help="rows of TRL's microbatch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the computation")
    parser.add_argument("--peak-tflops", type=float, help="peak of the device in this dtype; adds `mfu`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.median, args.hidden, args.layers, args.vocab, args.repeats = 8, 30, 64, 2, 512, 1
        args.micro_batch = 8
    torch.set_num_threads(args.threads)
    config = Config(token_budget=args.budget, optimizer=OptimizerConfig(lr=1e-6))
    config.correction.noise_floor_every = 0
    config.model.dtype = args.dtype
    rollouts = make_rollouts(
        rows=args.rows, median=args.median, sigma=args.sigma, vocab=args.vocab, longest=args.budget
    )
    batch = StepBatch.of(rollouts, mask_truncated=False)
    model = small_qwen3(hidden=args.hidden, layers=args.layers, vocab=args.vocab)
    with tempfile.TemporaryDirectory() as output:
        sides = {
            "bound": bound(Policy(copy.deepcopy(model), compute_dtype=args.dtype).to(DEVICE), batch, config),
            "lockstep": trainer_step(Policy(copy.deepcopy(model), compute_dtype=args.dtype), config, rollouts),
            "trl": trl(copy.deepcopy(model), batch, config, micro_batch=args.micro_batch, output=output),
        }
        for step in sides.values():  # the first step allocates buffers, caches and optimizer states
            step()
        seconds = interleaved(sides, repeats=args.repeats, clock=clock)
    best = {name: min(times) for name, times in seconds.items()}
    trained_tokens = batch.layout.num_tokens
    rows = [{"side": name, "s/update": best[name], "trained tokens/s": trained_tokens / best[name]} for name in best]
    numbers = {"overhead": best["lockstep"] / best["bound"] - 1, "trl_ratio": best["trl"] / best["lockstep"]}
    if args.peak_tflops:
        shape = ModelShape.of(model, model, model.config)
        flops = update_flops(shape, [len(row) for row in batch.rows])
        numbers["mfu"] = flops / best["lockstep"] / (args.peak_tflops * 1e12)
    details = {
        "parameters": model.num_parameters(),
        "tokens": sum(map(len, batch.rows)),
        "trained_tokens": trained_tokens,
        "seconds": seconds,
    }
    report("update", rows, numbers, as_json=args.json, details=details)


if __name__ == "__main__":
    main()
