"""Checks of engines that compute with other weights than are sent: adapters, quantized weights, batch invariance."""

from __future__ import annotations

import asyncio

import torch

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.protocol import BASE
from lockstep.rollout.errors import LockstepError
from lockstep.rollout.weights.source import ZeroSource, nbytes
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.policy import Policy
from scripts.gpu_checks.measured import Measured, above, below, equal, unbounded
from scripts.gpu_checks.quantized_checkpoint import write_quantized_checkpoint
from scripts.gpu_checks.subject import Subject

LORA = LoraConfig(rank=16, alpha=32)


def adapters(subject: Subject) -> list[Measured]:
    prompts = subject.prompts(subject.pick(32, 8), 24)
    with subject.served(lora=LORA, adapters=AdapterSettings(max_rank=16)) as served:
        loop, engine = served.engine.loop, served.engine
        first = served.push()
        sums, base = loop.run(engine.weight_checksums()), served.sample(prompts, 32, model=BASE)
        moved: list[Measured] = []
        agreed: list[Measured] = []
        for seed in range(3):
            served.perturb(seed)
            before = served.mismatch(base).mean().item()
            report = served.push()
            calls = served.sample(prompts, 32)
            difference = served.mismatch(calls)
            moved.append(above(f"update {seed + 1} moves mean |Δ| of the base", before, 3 * difference.mean().item()))
            agreed += served.agreement(f"update {seed + 1}, engine and trainer", difference, calls)
        whole = sum(map(nbytes, ZeroSource(served.policy.model, dtype=engine.dtype).metadata))
        return [
            *moved,
            *agreed,
            below("largest canary", max(first.canary_abs_diff, report.canary_abs_diff), subject.pick(0.3, 1e-3)),
            equal("weights of the base", loop.run(engine.weight_checksums()) == sums, True),
            below("bytes sent over those of the model", report.bytes / whole, subject.pick(0.1, 1.0)),
            unbounded("pause of a sync, s", report.pause_s),
        ]


def quantized(subject: Subject) -> list[Measured]:
    found: list[Measured] = []
    prompts = subject.prompts(32, 24)
    for scheme in ("fp8_per_channel", "fp8_per_block", "fp8_per_tensor"):
        try:
            with subject.served(quantization=scheme) as served:
                served.push()
                differences = []
                for seed in range(2):
                    served.perturb(seed)
                    served.push()
                    differences.append(served.mismatch(served.sample(prompts, 32)).mean().item())
        except LockstepError as error:  # a scheme without kernels for this GPU
            found.append(unbounded(f"{scheme}: refused", str(error).splitlines()[0]))
            continue
        found.append(below(f"{scheme}: mean |Δ|, engine and trainer, largest", max(differences), 0.3))
    return found


def quantized_base(subject: Subject) -> list[Measured]:
    prompts, path = subject.prompts(subject.pick(32, 8), 24), subject.directory / "w8a8"
    write_quantized_checkpoint(subject.saved, path)
    policy = Policy.from_pretrained(path, lora=LORA, compute_dtype=subject.dtype).to(subject.device)
    with subject.served(policy=policy, path=path, adapters=AdapterSettings(max_rank=16)) as served:
        loop, engine = served.engine.loop, served.engine
        served.push()
        sums, base = loop.run(engine.weight_checksums()), served.sample(prompts, 32)
        floor = served.mismatch(base).mean().item()
        moved, agreed = [], []
        for seed in range(3):
            served.perturb(seed)
            moved.append(served.mismatch(base).mean().item())
            served.push()
            agreed.append(served.mismatch(served.sample(prompts, 32)).mean().item())
        return [
            below("mean |Δ|, engine and trainer, of the first push", floor, 0.3),
            above("mean |Δ| that the updates make, smallest", min(moved), 3 * floor),
            below("mean |Δ|, engine and trainer, largest", max(agreed), min(0.3, 3 * floor)),
            equal("quantized weights", loop.run(engine.weight_checksums()) == sums, True),
        ]


def invariant(subject: Subject) -> list[Measured]:
    ids = [list(prompt) for prompt in subject.prompts(64, 200)]
    with subject.served(batch_invariant=True) as served:
        loop, engine = served.engine.loop, served.engine
        alone = torch.tensor([loop.run(engine.score(one)) for one in ids])

        async def together() -> list[list[float]]:
            return await asyncio.gather(*map(engine.score, ids))

        batched = torch.tensor(loop.run(together()))
        served.perturb(0)
        served.push()
        calls = served.sample(subject.prompts(8, 24), 32)
        agreed = served.agreement("engine and trainer after a push", served.mismatch(calls), calls)
    return [
        equal("largest |Δ| of scores alone and in a batch", (alone - batched).abs().max().item(), 0.0),
        *agreed,
    ]
