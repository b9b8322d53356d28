"""Checks of engines that compute with other weights than are sent: adapters, quantized weights, batch invariance."""

from __future__ import annotations

import asyncio

import torch

from lockstep.rollout.engine.adapters import AdapterSettings
from lockstep.rollout.engine.protocol import BASE
from lockstep.rollout.errors import LockstepError
from lockstep.rollout.weights.source import ZeroSource, nbytes
from lockstep.scripts.gpu_checks.measured import Measured, above, below, equal, unbounded
from lockstep.scripts.gpu_checks.quantized_checkpoint import write_quantized_checkpoint
from lockstep.scripts.gpu_checks.subject import Subject
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.model.policy import Policy

LORA = LoraConfig(rank=16, alpha=32)


def adapters(subject: Subject) -> list[Measured]:
    prompts = subject.prompts(subject.pick(32, 8), 24)
    with subject.served(lora=LORA, adapters=AdapterSettings(max_rank=16)) as pair:
        loop, engine = pair.engine.loop, pair.engine
        first = pair.push()
        sums, base = loop.run(engine.weight_checksums()), pair.sample(prompts, 32, model=BASE)
        moves: list[Measured] = []
        agreement: list[Measured] = []
        for seed in range(3):
            pair.perturb(seed)
            before = pair.mismatch(base).mean().item()
            report = pair.push()
            calls = pair.sample(prompts, 32)
            difference = pair.mismatch(calls)
            moves.append(above(f"update {seed + 1} moves mean |Δ| of the base", before, 3 * difference.mean().item()))
            agreement += pair.agreement(f"update {seed + 1}, engine and trainer", difference, calls)
        whole = sum(map(nbytes, ZeroSource(pair.policy.model, dtype=engine.dtype).metadata))
        return [
            *moves,
            *agreement,
            below("largest canary", max(first.canary_abs_diff, report.canary_abs_diff), subject.pick(0.3, 1e-3)),
            equal("weights of the base", loop.run(engine.weight_checksums()) == sums, True),
            below("bytes sent over those of the model", report.bytes / whole, subject.pick(0.1, 1.0)),
            unbounded("pause of a sync, s", report.pause_s),
        ]


def quantized(subject: Subject) -> list[Measured]:
    measurements: list[Measured] = []
    prompts = subject.prompts(32, 24)
    for scheme in ("fp8_per_channel", "fp8_per_block", "fp8_per_tensor"):
        try:
            with subject.served(quantization=scheme) as pair:
                pair.push()
                differences = []
                for seed in range(2):
                    pair.perturb(seed)
                    pair.push()
                    differences.append(pair.mismatch(pair.sample(prompts, 32)).mean().item())
        except LockstepError as error:  # a scheme without kernels for this GPU
            measurements.append(unbounded(f"{scheme}: refused", str(error).splitlines()[0]))
            continue
        measurements.append(below(f"{scheme}: mean |Δ|, engine and trainer, largest", max(differences), 0.3))
    return measurements


def quantized_base(subject: Subject) -> list[Measured]:
    prompts, path = subject.prompts(subject.pick(32, 8), 24), subject.directory / "w8a8"
    write_quantized_checkpoint(subject.saved, path)
    policy = Policy.from_pretrained(path, lora=LORA, compute_dtype=subject.dtype).to(subject.device)
    with subject.served(policy=policy, path=path, adapters=AdapterSettings(max_rank=16)) as pair:
        loop, engine = pair.engine.loop, pair.engine
        pair.push()
        sums, base = loop.run(engine.weight_checksums()), pair.sample(prompts, 32)
        floor = pair.mismatch(base).mean().item()
        moves, mismatches = [], []
        for seed in range(3):
            pair.perturb(seed)
            moves.append(pair.mismatch(base).mean().item())
            pair.push()
            mismatches.append(pair.mismatch(pair.sample(prompts, 32)).mean().item())
        return [
            below("mean |Δ|, engine and trainer, of the first push", floor, 0.3),
            above("mean |Δ| that the updates make, smallest", min(moves), 3 * floor),
            below("mean |Δ|, engine and trainer, largest", max(mismatches), min(0.3, 3 * floor)),
            equal("quantized weights", loop.run(engine.weight_checksums()) == sums, True),
        ]


def invariant(subject: Subject) -> list[Measured]:
    ids = [list(prompt) for prompt in subject.prompts(64, 200)]
    with subject.served(batch_invariant=True) as pair:
        loop, engine = pair.engine.loop, pair.engine
        alone = torch.tensor([loop.run(engine.score(one)) for one in ids])

        async def together() -> list[list[float]]:
            return await asyncio.gather(*map(engine.score, ids))

        batch_scores = torch.tensor(loop.run(together()))
        pair.perturb(0)
        pair.push()
        calls = pair.sample(subject.prompts(8, 24), 32)
        agreement = pair.agreement("engine and trainer after a push", pair.mismatch(calls), calls)
    return [
        equal("largest |Δ| of scores alone and in a batch", (alone - batch_scores).abs().max().item(), 0.0),
        *agreement,
    ]
