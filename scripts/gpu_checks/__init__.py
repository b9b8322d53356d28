"""Checks of `make gpu-check`: their names, expectations and limits. Imports nothing heavy.

Check NAME is the function NAME of its module. It takes a `Subject` and returns its measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check, which runs in a process of its own."""

    name: str
    module: str
    """Module with the function."""
    expected: str
    """Expectation, in words and numbers."""
    num_gpus: int = 1
    rehearses: bool = False
    """True if the check has a form for machines without a GPU."""
    needs_vnni: bool = False
    """True if its bounds hold for CPUs with VNNI, whose int8 products are not saturated."""
    is_quick: bool = False
    """True if the check is one of the first five minutes (`--quick`)."""
    limit_s: float = 300.0


CHECKS = (
    Check(
        name="environment",
        module="lockstep.scripts.gpu_checks.environment",
        expected="CUDA 13, driver 580, NCCL 2.29.7 or newer; vLLM's kernels load; torch allocates no expandable "
        "segments; 90 % of the memory is free",
        rehearses=True,
        is_quick=True,
        limit_s=120,
    ),
    Check(
        name="first_update",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates of scripts/train.py on one GPU, the second one traced: token match 1, |kl| < 2e-3, k3 < "
        "5e-3, ess > 0.95",
        rehearses=True,
        is_quick=True,
    ),
    Check(
        name="engine",
        module="lockstep.scripts.gpu_checks.engines",
        expected="V2 model runner with asynchronous scheduling; starts in 150 s, again in 60 s; 256 requests of 256 "
        "tokens at 10,000 tokens per second",
        limit_s=400,
    ),
    Check(
        name="evidence",
        module="lockstep.scripts.gpu_checks.engines",
        expected="sampled logprobs against the engine's scores and the trainer's: mean |Δ| less than twice, largest "
        "less than three times the floor of the same tokens; logits in float32",
        rehearses=True,
        is_quick=True,
    ),
    Check(
        name="transfer",
        module="lockstep.scripts.gpu_checks.engines",
        expected="five pushes of different weights: version read back, canary < 0.3, |Δ| within the floor, all "
        "comparable checksums equal; 20 GB/s; memory level to 100 MiB after the second push",
        rehearses=True,
        is_quick=True,
    ),
    Check(
        name="canary",
        module="lockstep.scripts.gpu_checks.engines",
        expected="without a push, one trainer layer scaled by 1.5 exceeds the thresholds of both rows; with equal "
        "weights the long row differs by less than half of what is accepted",
        rehearses=True,
    ),
    Check(
        name="graphs",
        module="lockstep.scripts.gpu_checks.engines",
        expected="after pushes, an engine with CUDA graphs scores as an eager one with the same weights: |Δ| within "
        "the floor",
        limit_s=400,
    ),
    Check(
        name="sleep",
        module="lockstep.scripts.gpu_checks.engines",
        expected="ten times: the trainer takes 60 % of the GPU, the engine sleeps, wakes in 1 s, gets weights and "
        "samples; asleep it keeps less than 3 GiB; level 1 works too",
    ),
    Check(
        name="restart",
        module="lockstep.scripts.gpu_checks.engines",
        expected="a killed engine is an error, starts again beside the trainer's memory, and samples with pushed "
        "weights; embedded and colocated",
        rehearses=True,
        limit_s=500,
    ),
    Check(
        name="adapters",
        module="lockstep.scripts.gpu_checks.adapters",
        expected="pushes of LoRA adapters: |Δ| within the floor after updates that make three times its mean, the "
        "base's weights unchanged, less than a tenth of the model's bytes sent",
        rehearses=True,
    ),
    Check(
        name="quantized",
        module="lockstep.scripts.gpu_checks.adapters",
        expected="engines that quantize to fp8, per channel, block and tensor, follow pushes: mean |Δ| < 0.3",
        limit_s=500,
    ),
    Check(
        name="quantized_base",
        module="lockstep.scripts.gpu_checks.adapters",
        expected="adapters on int8 weights (W8A8): mean |Δ| after pushes < 0.3 and less than 3 times that of the "
        "first, the engine's weights unchanged",
        rehearses=True,
        needs_vnni=True,
    ),
    Check(
        name="invariant",
        module="lockstep.scripts.gpu_checks.adapters",
        expected="with rollout.batch_invariant=true, 64 scores alone and in one batch are equal bit for bit; a push "
        "arrives",
    ),
    Check(
        name="recurrent",
        module="lockstep.scripts.gpu_checks.numerics",
        expected="rows of a pack change each other's scores by less than 0.03 in Falcon-H1 and Qwen3-Next, by the "
        "kernels of causal-conv1d, flash-linear-attention and mamba-ssm where they are installed, else row by row",
        rehearses=True,
    ),
    Check(
        name="attention",
        module="lockstep.scripts.gpu_checks.numerics",
        expected="packed rows against float32, with and without shared prefixes, windows shorter and longer than the "
        "rows, heads of 64, 128 and 256, under autocast and with bfloat16 weights: |Δ log π| within the floor and turn "
        "of the gradient less than twice that of each row alone in transformers' own attention; one call of the kernel "
        "per layer, none of the math kernel",
        rehearses=True,
    ),
    Check(
        name="compiled",
        module="lockstep.scripts.gpu_checks.numerics",
        expected="compiled layers against float32: |Δ log π| within the floor and turn of the gradient less than twice "
        "that of plain layers; packs of other lengths compile nothing; time < 1 of plain layers",
        rehearses=True,
    ),
    Check(
        name="head",
        module="lockstep.scripts.gpu_checks.numerics",
        expected="fused head against full logits: largest |Δ| < 1e-5 in float32, mean |Δ| < 2e-3 in bfloat16; memory "
        "< 0.35 and time < 1.3 of the full head",
        rehearses=True,
    ),
    Check(
        name="head_kernels",
        module="lockstep.scripts.gpu_checks.numerics",
        expected="the head's kernels against float64, with bias, softcap, entropy and candidates: error of values and "
        "gradients less than twice that of torch's operations on the same tiles; no more time, and memory < 1.05 of "
        "theirs",
        rehearses=True,
    ),
    Check(
        name="nccl",
        module="lockstep.scripts.gpu_checks.two_gpus",
        expected="pushes to a server on another GPU: canary < 0.3, 10 GB/s (NVLink 50), and weights that the optimizer "
        "still writes arrive whole; with 3 GPUs, two of them in tensor parallel",
        num_gpus=2,
        limit_s=500,
    ),
    Check(
        name="partition",
        module="lockstep.scripts.gpu_checks.partition",
        expected="one gradient from one process, DDP, ZeRO-2 and ZeRO-3: relative error < 1e-5 in float32; the sent "
        "weights are the gathered ones, bit for bit",
        num_gpus=2,
        rehearses=True,
        limit_s=500,
    ),
    Check(
        name="memory",
        module="lockstep.scripts.gpu_checks.two_gpus",
        expected="out of memory on one rank: DDP halves the budget on both, ZeRO-3 ends all processes in 120 s; the "
        "memory plan is within a third of the peak",
        num_gpus=2,
        limit_s=500,
    ),
    Check(
        name="scheduler",
        module="lockstep.scripts.gpu_checks.engines",
        expected="requests with 1 and 21 logprobs, frozen for a new version under load: no token lost or unlabeled; "
        "long prompts leave 70 % of the decoding speed",
        rehearses=True,
    ),
    Check(
        name="ranks",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates under DDP, ZeRO-2 and ZeRO-3, an engine on every GPU, asleep during updates: as "
        "first_update",
        num_gpus=2,
        limit_s=600,
    ),
    Check(
        name="adapter_ranks",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates of LoRA under DDP and ZeRO-3: as first_update",
        num_gpus=2,
        limit_s=500,
    ),
    Check(
        name="critic",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates of PPO with a critic and a reference under ZeRO-3: as first_update; KL to the reference "
        "< 0.01 before the first update",
        limit_s=500,
    ),
    Check(
        name="mixture",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates of a mixture of experts, with routes of the trainer and of the engine: as first_update",
        limit_s=500,
    ),
    Check(
        name="long_row",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates on rows of 16 k tokens: as first_update",
        rehearses=True,
        limit_s=500,
    ),
    Check(
        name="stale",
        module="lockstep.scripts.gpu_checks.runs",
        expected="four updates with rollout.max_staleness=1: as first_update, ess > 0.9",
        rehearses=True,
    ),
    Check(
        name="resume",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates, and two more after a resume: as first_update",
        rehearses=True,
        limit_s=500,
    ),
    Check(
        name="offload",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates under ZeRO-3 with weights and optimizer in main memory: as first_update",
    ),
    Check(
        name="adam_8bit",
        module="lockstep.scripts.gpu_checks.runs",
        expected="two updates with 8-bit Adam, if bitsandbytes is installed: as first_update",
    ),
    Check(
        name="loop",
        module="lockstep.scripts.gpu_checks.runs",
        expected="five updates of a model of 0.7 B parameters, colocated on all GPUs: as first_update; sync < 10 % of "
        "a step; the update reaches 0.25 of the rate of products that is measured beside it",
        rehearses=True,
        limit_s=600,
    ),
)
"""All checks in the order in which they run: a later one rarely passes if an earlier one fails."""
