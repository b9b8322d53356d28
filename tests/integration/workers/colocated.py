"""Worker of `test_colocated.py` under `accelerate launch`: two ranks with an engine each.

Each rank writes its observations to `<directory>/rank<n>.json` for the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.errors import EngineError, LockstepError
from lockstep.rollout.records import EngineCall
from lockstep.rollout.server.remote_rank_engine import EngineService
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.run_engines import start_engines
from tests.fixtures.models import perturb, sampled_logprobs
from tests.fixtures.processes import descendants

PROMPTS = [tuple(range(10 + i, 150 + i)) for i in range(6)]
SAMPLING = Sampling(max_tokens=16, ignore_eos=True, seed=5)


def main(directory: Path) -> None:
    config = Config()
    config.model.path = str(directory / "model")
    config.rollout.engine = "colocated"
    config.rollout.max_model_len, config.rollout.kv_cache_gib = 320, 0.0625
    answered = counted()
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    with BackgroundLoop() as loop:
        engines = start_engines(config, distributed, loop=loop, logs=directory)
        own = engines.colocated[0]
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(config.model.path)
        # Merged weights go from each rank to its own engine, shards from both ranks to both engines.
        adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        model = distributed.prepare_frozen(get_peft_model(base, adapters))
        sync = WeightSync(
            module=model,
            engines=engines.synced,
            sleep_level=2,
            score_canary=lambda ids: sampled_logprobs(model, tuple(ids[:1]), tuple(ids[1:])),
            deadline_s=60,
        )
        seen: dict[str, Any] = {"syncs": []}
        for version in (1, 2):
            with distributed.whole_parameters(model):
                if distributed.is_main:
                    perturb(model, seed=version)
            report = sync.push(version)
            calls = sampled(engines.pool, loop) if engines.pool else []
            distributed.barrier()  # the trainer's forward passes are collectives, rank 0's sampling is not
            everywhere = distributed.broadcast([[call.prompt_ids, call.sampled_ids] for call in calls])
            expected = [sampled_logprobs(model, tuple(prompt), tuple(ids)) for prompt, ids in everywhere]
            found = [call.sampled_logprobs for call in calls]
            seen["syncs"].append(
                {
                    "canary": report.canary_abs_diff,
                    "version": loop.run(own.weight_version()),
                    "versions": sorted({call.oldest_version for call in calls}),
                    "mismatch": max(
                        (abs(a - b) for x, y in zip(expected, found, strict=False) for a, b in zip(x, y, strict=True)),
                        default=0.0,
                    ),
                    "answered": len(answered),
                }
            )
            sync.sleep()
            seen["asleep"] = raised(lambda: loop.run(own.weight_version()))
        seen["after sleep"] = recorded(own, lambda: sync.push(3))
        seen["seeds"] = same_everywhere(engines.pool, loop) if engines.pool else True
        distributed.barrier()
        if not distributed.is_main:
            for pid in descendants(os.getpid()) - {os.getpid()}:
                os.kill(pid, signal.SIGKILL)
        distributed.barrier()
        seen["killed"] = raised(lambda: sampled(engines.pool, loop)) if engines.pool else None
        (directory / f"rank{distributed.rank}.json").write_text(json.dumps(seen))
        distributed.barrier()
        sync.close()
        engines.close()
    distributed.close()


def recorded(engine: Any, act: Callable[[], object]) -> list[str]:
    """Return the calls to the engine during `act` that allocate, replace weights or resume."""
    calls: list[str] = []

    def wrap(name: str) -> None:
        method = getattr(engine, name)

        def call(*args: Any) -> Any:
            calls.append(" ".join([name, *args]) if name == "wake" else name)
            return method(*args)

        setattr(engine, name, call)

    names = ("wake", "start_weight_update", "finish_weight_update", "resume")
    for name in names:
        wrap(name)
    act()
    for name in names:
        delattr(engine, name)
    return calls


def counted() -> list[int]:
    """Record one entry for each request that this rank's engine answers for another rank."""
    answered: list[int] = []
    original = EngineService._generate

    async def generate(self: EngineService, body: Any) -> Any:
        answered.append(1)
        return await original(self, body)

    EngineService._generate = generate  # type: ignore[method-assign]
    return answered


def sampled(pool: Any, loop: BackgroundLoop) -> list[EngineCall]:
    async def all_of_them() -> list[EngineCall]:
        return await asyncio.gather(*(pool.generate(prompt, SAMPLING) for prompt in PROMPTS))

    return loop.run(all_of_them())


def same_everywhere(pool: Any, loop: BackgroundLoop) -> bool:
    """True if both engines sample the same tokens for the same seed."""
    first, second = (loop.run(member.generate(PROMPTS[0], SAMPLING)) for member in pool.members)
    return first.sampled_ids == second.sampled_ids


def raised(act: Any) -> str | None:
    try:
        act()
    except (EngineError, LockstepError) as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
