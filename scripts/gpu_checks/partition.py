"""Check that one batch gives one gradient, however it is divided over microbatches and ranks.

On several ranks: `accelerate launch -m lockstep.scripts.gpu_checks.partition MODEL TOKEN_BUDGET OUT`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.rollout.weights.source import ZeroSource
from lockstep.scripts.gpu_checks.measured import Measured, above, below, equal
from lockstep.scripts.gpu_checks.runs import launched
from lockstep.scripts.gpu_checks.subject import Subject
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.updater import Updater

ONE_PACK, MANY_PACKS = 100_000, 96


def partition(subject: Subject) -> list[Measured]:
    model = Subject(directory=subject.directory, rehearses=True).saved  # float32: a tiny one shows more
    whole = _gradient(model, ONE_PACK, None)
    measurements = [above("norm of the gradient", float(np.linalg.norm(whole["gradient"])), 1e-4)]
    partitions = {"one process, many microbatches": (None, MANY_PACKS)}
    if not subject.rehearses:
        partitions |= {f"{name} on two ranks": (name, MANY_PACKS) for name in ("ddp", "zero2", "zero3")}
    for name, (launcher, budget) in partitions.items():
        if launcher is None:
            other = _gradient(model, budget, None)
        else:
            out = subject.directory / f"{launcher}.npz"
            arguments = ["-m", "lockstep.scripts.gpu_checks.partition", str(model), str(budget), str(out)]
            subprocess.run(launched(launcher, 2, arguments), check=True)
            with np.load(out) as arrays:
                other = dict(arrays)
        error = np.linalg.norm(other["gradient"] - whole["gradient"]) / np.linalg.norm(whole["gradient"])
        measurements += [
            below(f"{name}: relative error", float(error), 1e-5),
            above(f"{name}: microbatches of a rank", float(other["microbatches"]), 1),
        ]
        if launcher is not None:
            measurements.append(equal(f"{name}: sent weights equal gathered ones", bool(other["is_sent_whole"]), True))
    return measurements


class _GradientsOnly(Distributed):
    """`Distributed` that keeps the gradients of an update instead of making it."""

    gradient: np.ndarray

    def step(self, lr: float, grad_norm: float, *, critic_only: bool = False) -> None:
        parameters = list(self.unwrapped.parameters())
        if self.uses_deepspeed:
            from deepspeed.utils import safe_get_full_grad

            gradients: list[Any] = [safe_get_full_grad(parameter) for parameter in parameters]
            self.module.optimizer.zero_grad()
        else:
            gradients = [parameter.grad for parameter in parameters]
        self.gradient = np.concatenate([gradient.detach().float().cpu().numpy().ravel() for gradient in gradients])
        if not self.uses_deepspeed:
            self.module.zero_grad()


def _gradient(model: Path, token_budget: int, out: Path | None) -> dict[str, Any]:
    """Return the gradient of a fixed batch; with `out`, write it and what ranks can compare."""
    distributed = _GradientsOnly.start(dtype="float32", max_grad_norm=0.0)
    policy = Policy.from_pretrained(model)
    module = distributed.prepare(policy, torch.optim.SGD(policy.parameters(), lr=1.0))
    config = Config(token_budget=token_budget)
    config.model.path = str(model)
    batch = StepBatch.of(_rollouts(), mask_truncated=False)
    updater = Updater(module, distributed, config)
    logprobs = Logprobs(old=Recomputed(updater.scorer.score(batch)))
    correction = StepCorrection.of(batch, logprobs.old, CorrectionConfig(mode="token_truncate"))
    targets, _ = rollout_targets(batch, logprobs, correction, config.algorithm)
    metrics = updater.update(batch, targets).metrics
    facts = {"gradient": distributed.gradient, "microbatches": metrics["perf/microbatches"]}
    if out is not None:
        facts["is_sent_whole"] = _is_sent_whole(distributed)
        if distributed.is_main:
            np.savez(out, **facts)
        distributed.close()
    return facts


def _is_sent_whole(distributed: Distributed) -> bool:
    """Return True if the weights that transports send are the gathered ones; a collective."""
    model = distributed.unwrapped.model
    with distributed.whole_parameters(model):
        whole = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    source = ZeroSource(model, dtype=torch.float32, bucket_bytes=2**16, readers=[0])
    sent_tensors = {name: tensor.cpu().clone() for name, tensor in source}
    if not distributed.is_main:
        return True
    return sent_tensors.keys() == whole.keys() and all(
        torch.equal(whole[name], sent_tensors[name]) for name in sent_tensors
    )


def _rollouts() -> list[Rollout]:
    """Make nine rollouts of unequal lengths in three groups, with different rewards within a group."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, 200, (3, 20)).tolist()

    def rollout(index: int) -> Rollout:
        length = int(rng.integers(2, 40))
        call = EngineCall(
            prompt_ids=tuple(prompts[index // 3]),
            sampled_ids=tuple(rng.integers(5, 200, length).tolist()),
            sampled_logprobs=tuple(rng.normal(-6, 0.3, length).tolist()),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=length),),
        )
        return Rollout(rollout_id=index, group_id=index // 3, calls=(call,), reward=float(index % 3))

    return [rollout(index) for index in range(9)]


if __name__ == "__main__":
    _gradient(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
