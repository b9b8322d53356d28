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
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.weights.sync import WeightSync
from lockstep.trainer.collect.several_ranks import driver_ranks
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
    distributed = Distributed.start(dtype="float32", max_grad_norm=1.0)
    with BackgroundLoop() as loop:
        ranks = driver_ranks(config.rollout, distributed, address=None)
        engines = start_engines(config, distributed, loop=loop, logs=directory, drivers=ranks)
        assert engines.pool is not None
        own: Any = engines.synced.engines[0]
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
            calls = sampled(engines.pool, loop)
            # The trainer's forward passes are collectives.
            own_ids = json.dumps([[call.prompt_ids, call.sampled_ids] for call in calls]).encode()
            everywhere = [json.loads(ids) for ids in distributed.gather_bytes(own_ids)]
            expected = [[sampled_logprobs(model, tuple(p), tuple(ids)) for p, ids in rank] for rank in everywhere]
            pairs = zip(expected[distributed.rank], (call.sampled_logprobs for call in calls), strict=True)
            seen["syncs"].append(
                {
                    "canary": report.canary_abs_diff,
                    "version": loop.run(own.weight_version()),
                    "versions": sorted({call.oldest_version for call in calls}),
                    "mismatch": max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)),
                    "same tokens": everywhere[0] == everywhere[1],
                }
            )
            sync.sleep()
            seen["asleep"] = raised(lambda: loop.run(own.weight_version()))
        seen["after sleep"] = recorded(own, lambda: sync.push(3))
        distributed.barrier()
        if not distributed.is_main:
            for pid in descendants(os.getpid()) - {os.getpid()}:
                os.kill(pid, signal.SIGKILL)
        distributed.barrier()
        seen["killed"] = raised(lambda: sampled(engines.pool, loop))
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


def sampled(pool: Any, loop: BackgroundLoop) -> list[EngineCall]:
    async def all_of_them() -> list[EngineCall]:
        return await asyncio.gather(*(pool.generate(prompt, SAMPLING) for prompt in PROMPTS))

    return loop.run(all_of_them())


def raised(act: Any) -> str | None:
    try:
        act()
    except (EngineError, LockstepError) as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
