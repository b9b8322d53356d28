"""Checks of transfers and memory between two GPUs.

On several ranks: `accelerate launch -m lockstep.scripts.gpu_checks.two_gpus MODEL OUT` lets rank 1 run out of memory.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.rollout.server.server_engine import ServerEngine
from lockstep.rollout.system.addresses import LOOPBACK
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import WeightSync
from lockstep.scripts.gpu_checks.measured import Measured, above, below, equal, unbounded
from lockstep.scripts.gpu_checks.runs import launched, python
from lockstep.scripts.gpu_checks.subject import Served, Subject
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.cli import run_or_end
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.memory_plan import memory_plan
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.model.shape import ModelShape
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Updater

PORT = 8765
KEY_ENV = "LOCKSTEP_ENGINE_KEY"
BUDGET = 16_384
"""Tokens of a pack, before memory runs out."""


def nccl(subject: Subject) -> list[Measured]:
    measurements = _pushes(subject, [1])
    return measurements + (_pushes(subject, [1, 2]) if torch.cuda.device_count() > 2 else [])


def _pushes(subject: Subject, gpus: list[int]) -> list[Measured]:
    """Push from GPU 0 to a server on other GPUs, also while the optimizer's kernels are still queued."""
    key = secrets.token_hex(32)
    settings = {
        "model.path": subject.saved,
        "model.dtype": subject.dtype,
        "server.port": PORT,
        "rollout.max_model_len": subject.max_model_len,
        "rollout.kv_cache_gib": 4,
        "server.vllm_args": f"[--tensor-parallel-size,{len(gpus)}]",
    }
    command = [python(), "-m", "lockstep", "serve-engine", *(f"{name}={value}" for name, value in settings.items())]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": _visible(gpus), KEY_ENV: key}
    name = f"{len(gpus)} GPU of the server" if len(gpus) == 1 else f"{len(gpus)} GPUs of the server"
    server = subprocess.Popen(command, env=environment)
    try:
        with BackgroundLoop() as loop:
            vocabulary = subject.config().vocab_size
            engine = ServerEngine(f"http://{LOOPBACK}:{PORT}", loop=loop, vocab_size=vocabulary, api_key=key)
            pair = Served(subject=subject, engine=engine, policy=subject.new_policy())
            pair.sync = WeightSync(module=pair.policy.model, engines=[engine], score_canary=pair.scores)
            reports = []
            for seed in range(5):
                pair.perturb(seed)
                reports.append(pair.push())
            torch.cuda._sleep(10**9)  # about half a second, in which the change below is queued
            with torch.no_grad():
                for parameter in pair.policy.causal_lm.get_decoder().get_submodule("layers.2").parameters():
                    parameter.mul_(1.5)
            reports.append(pair.push())
            calls = pair.sample(subject.prompts(8, 24), 32)
            agreement = pair.agreement(f"{name}, after a push behind queued kernels", pair.mismatch(calls), calls)
            pair.sync.close()
            loop.run(engine.close())
    finally:
        server.terminate()
        server.wait(timeout=60)
    return [
        below(f"{name}: largest canary", max(report.canary_abs_diff for report in reports), 0.3),
        *agreement,
        above(f"{name}: GB/s, fastest (NVLink: 50)", max(report.gb_per_s for report in reports), 10),
    ]


def _visible(gpus: list[int]) -> str:
    """Return these GPUs as `CUDA_VISIBLE_DEVICES` of a child process."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = own.split(",") if own else [str(index) for index in range(torch.cuda.device_count())]
    return ",".join(names[gpu] for gpu in gpus)


def memory(subject: Subject) -> list[Measured]:
    measurements = []
    for config in ("ddp", "zero3"):
        out = subject.directory / config
        out.mkdir()
        arguments = ["-m", "lockstep.scripts.gpu_checks.two_gpus", str(subject.saved), str(out)]
        result = subprocess.run(launched(config, 2, arguments), check=False)
        end = time.time()
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("rank*.json"))]
        peak = ranks[0]["peak"] / ranks[0]["planned"]
        measurements += [
            above(f"{config}: peak over the plan", peak, 2 / 3),
            below(f"{config}: peak over the plan", peak, 4 / 3),
        ]
        if config == "ddp":
            budgets = [rank.get("budget", -1) for rank in ranks]
            measurements += [
                equal("ddp: ranks with the same budget", len(budgets) if len(set(budgets)) == 1 else 1, 2),
                below("ddp: budget after memory ran out", max(budgets), BUDGET),
                above("ddp: budget after memory ran out", min(budgets), 0),
            ]
        else:
            measurements += [
                equal("zero3: run failed", result.returncode != 0, True),
                below("zero3: seconds until all processes ended", end - ranks[0]["limited_at"], 120),
                unbounded("zero3: status of the launcher", result.returncode),
            ]
    return measurements


def _rank(model: Path, out: Path) -> None:
    """Make one update, limit the memory of rank 1 to three fifths of what it took, and make another."""
    distributed = Distributed.start(dtype="bfloat16", max_grad_norm=1.0)
    config = Config(token_budget=BUDGET)
    config.model.path, config.model.dtype = str(model), "bfloat16"
    policy = Policy.from_pretrained(model, compute_dtype="bfloat16")
    module = distributed.prepare(policy, make_optimizer(policy, config.optimizer))
    updater = Updater(module, distributed, config)
    batch = dealt(StepBatch.of(_rollouts(), mask_truncated=False), distributed)

    def update() -> None:
        logprobs = Logprobs(old=Recomputed(updater.scorer.score(batch)))
        correction = StepCorrection.of(batch, logprobs.old, CorrectionConfig(mode="token_truncate"))
        updater.update(batch, rollout_targets(batch, logprobs, correction, config.algorithm)[0])

    update()
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    base_bytes, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    plan = memory_plan(
        ModelShape.of(policy, policy.model, policy.causal_lm.config),
        config,
        distributed.sharding,
    )
    planned_bytes = plan.total - plan.engine_weights - plan.kv_cache
    path = out / f"rank{distributed.rank}.json"
    facts = {"peak": peak, "planned": planned_bytes, "limited_at": time.time()}
    path.write_text(json.dumps(facts), encoding="utf-8")
    if distributed.rank == 1:
        torch.cuda.set_per_process_memory_fraction((base_bytes + 0.6 * (peak - base_bytes)) / total)
    update()
    path.write_text(json.dumps({**facts, "budget": updater.scorer.budget.tokens}), encoding="utf-8")
    distributed.close()


def _rollouts() -> list[Rollout]:
    """Make 64 rollouts of 1,024 tokens in groups of eight: two full packs for each of two ranks."""
    rng = np.random.default_rng(0)

    def rollout(index: int) -> Rollout:
        call = EngineCall(
            prompt_ids=tuple(rng.integers(5, 1000, 512).tolist()),
            sampled_ids=tuple(rng.integers(5, 1000, 512).tolist()),
            sampled_logprobs=(-11.0,) * 512,
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(version=0, start=0, end=512),),
        )
        return Rollout(rollout_id=index, group_id=index // 8, calls=(call,), reward=float(index % 3))

    return [rollout(index) for index in range(64)]


if __name__ == "__main__":
    run_or_end(lambda: _rank(Path(sys.argv[1]), Path(sys.argv[2])))
