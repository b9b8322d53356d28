"""Limit of a step's parts in benchmarks/limit.py, one process each, on the rows that the compared run has just trained:

    engine   vLLM's `LLM.generate` for the calls of this share: prompts as recorded, as many tokens as were sampled, one
             turn after the other, as a later prompt holds the earlier answer
    update   decoder, head and log-softmax over the packs of the run, their backward passes, AdamW, and one copy of all
             weights

A turn reads the file that the run has written (`lockstep_side.py --rows-to`). Reading and packing are not timed.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from harness.turns import Turn
from harness.workloads import COMPARED, AnyWorkload, configuration
from lockstep.rollout.engine.arguments import engine_arguments
from lockstep.rollout.records import TrainingRow
from lockstep.rollout.system.gc_freeze import gc_frozen
from lockstep.trainer.batch.assignment import plan
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.batch.prefix_bundles import plan_bundles
from lockstep.trainer.batch.prefixes import token_keys
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.schema import Config

Measure = Callable[[StepBatch], dict[str, float]]
"""Does the work of a step; returns its seconds by name."""


@contextmanager
def timed(parts: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time and the CPU time of this process [s]."""
    start, cpu = time.perf_counter(), time.process_time()
    yield
    parts[name] = time.perf_counter() - start
    parts["cpu"] = parts.get("cpu", 0.0) + time.process_time() - cpu


def calls(rows: Sequence[TrainingRow], index: int, number: int) -> dict[int, list[tuple[list[int], int]]]:
    """Return (prompt ids, sampled tokens) of the calls by turn, those of every `number`-th group from `index` on."""
    of_turns: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
    for row in rows:
        if row.group_id % number != index:
            continue
        for turn in np.unique(row.turns[row.loss_mask]).tolist():
            places = np.flatnonzero(row.turns == turn)
            of_turns[turn].append((row.ids[: places[0]].tolist(), len(places)))
    return dict(sorted(of_turns.items()))


def engine_side(workload: AnyWorkload, config: Config, index: int, number: int) -> Measure:
    """Start vLLM with the arguments of the run's engines."""
    from vllm import LLM, SamplingParams

    from lockstep.trainer.engines.start import engine_settings

    settings = engine_settings(
        config.model, config.rollout, config.correction, seed=config.seed, context=config.engine_context
    )
    llm = LLM(
        model=str(settings.model),
        dtype=settings.dtype,
        max_model_len=settings.vllm_context,
        kv_cache_memory_bytes=int((settings.kv_cache_gib or 1.0) * 2**30),
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=not settings.compile_on_cpu,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        **engine_arguments(settings, is_cpu=True),
    )

    def measure(batch: StepBatch) -> dict[str, float]:
        parts: dict[str, float] = {}
        of_turns = calls(batch.rows, index, number)
        llm.reset_prefix_cache()  # as a sync does
        with timed(parts, "engine"):
            for turn, requests in of_turns.items():
                params = [
                    SamplingParams(
                        max_tokens=num_tokens,
                        temperature=config.rollout.temperature,
                        ignore_eos=True,
                        logprobs=0,
                        flat_logprobs=True,
                        detokenize=False,
                        seed=1000 * turn + place,
                    )
                    for place, (_, num_tokens) in enumerate(requests)
                ]
                llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
        return parts

    return measure


def packs(batch: StepBatch, config: Config, longest_shared: int, index: int, number: int) -> list[PackedBatch]:
    """Return the packs of one of `number` ranks, with shared prefixes as in the run."""
    shares = config.share_prefixes != "never" and max(map(len, batch.rows)) <= longest_shared
    if shares:
        keys = [token_keys(row, with_routes=False) for row in batch.rows]
        assigned = plan_bundles(keys, num_ranks=number, token_budget=config.pack_tokens)
    else:
        assigned = plan(list(map(len, batch.rows)), num_ranks=number, token_budget=config.pack_tokens)
    return [
        collate(batch.rows, pack, batch.layout, share_prefixes=shares, device=torch.device("cpu"))
        for pack in assigned.microbatches[index]
        if pack
    ]


def update_side(config: Config, index: int, number: int) -> Measure:
    from lockstep.trainer.build import load_policy
    from lockstep.trainer.model.decoder import can_share_prefixes, decoder_setup
    from lockstep.trainer.model.layers.rotary import longest_shared
    from lockstep.trainer.update.optimizers.optimizer import make_optimizer

    policy = load_policy(config.model, decoder_setup(config.model, config.engine_context))
    optimizer = make_optimizer(policy, config.optimizer)
    longest = longest_shared(policy) if can_share_prefixes(policy) else 0
    weights = [parameter.detach().clone() for parameter in policy.parameters()]

    def measure(batch: StepBatch) -> dict[str, float]:
        parts: dict[str, float] = {}
        packed = packs(batch, config, longest, index, number)
        with timed(parts, "update"):
            for pack in packed:
                logp_T, *_ = policy(pack, temperature=config.rollout.temperature, with_entropy=False)
                (logp_T.sum() / batch.layout.num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with timed(parts, "copy"), torch.no_grad():
            for weight, parameter in zip(weights, policy.parameters(), strict=True):
                weight.copy_(parameter)
        return parts

    return measure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["engine", "update"])
    parser.add_argument("workload", choices=COMPARED)
    parser.add_argument("--rows", type=Path, required=True, help="file of the last update's rows")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("INDEX", "NUMBER"))
    parser.add_argument("settings", nargs="*", help="settings of the run")
    arguments = parser.parse_intermixed_args()
    index, number = arguments.share
    turn = Turn()
    workload = COMPARED[arguments.workload]
    config = configuration([*workload.settings(), *arguments.settings])
    if number > 1:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[index::number] or cores[index % len(cores) :][:1])
    if arguments.part == "engine":
        measure = engine_side(workload, config, index, number)
    else:
        measure = update_side(config, index, number)
    turn.over()  # the startup
    with gc_frozen():
        while True:
            turn.over(**measure(pickle.loads(arguments.rows.read_bytes())))  # noqa: S301 - written by the compared run


if __name__ == "__main__":
    main()
