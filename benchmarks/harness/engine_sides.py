"""Sides of benchmarks/rollouts.py, one process each: a batch of rollouts in vLLM alone, and in Lockstep.

    vllm        `LLM.generate` on all requests at once, in this process
    engine      `EmbeddedEngine.generate`, one task per request, from the asyncio loop of the trainer
    rollouts    `Sampler.collect`: episodes of an environment on the same prompts

All three send the same requests, with the same seeds and fixed lengths, and ask for the logprob of the sampled token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.turns import Turn
from harness.workloads import WORKLOADS, Workload
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.engine.engine_settings import EngineSettings
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.episode.conversation import request_seed
from lockstep.rollout.sampler.sampler import Sampler
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.rollout.system.gc_freeze import gc_frozen

MAX_NUM_SEQS, KV_CACHE_GIB = 256, 0.25
Batch = Callable[[int], int]
"""Samples the batch of a number, which enters the seeds, and returns its number of sampled tokens."""


def questions(workload: Workload) -> list[dict]:
    lines = workload.data_path.read_text().splitlines()[: workload.prompts]
    return [json.loads(line) for line in lines]


def requests(workload: Workload, chat: Chat) -> list[list[int]]:
    """Return the prompt ids of every sample."""
    prompts = [chat.prompt([{"role": "user", "content": row["question"]}]) for row in questions(workload)]
    return [ids for ids in prompts for _ in range(workload.samples_per_prompt)]


def vllm_side(workload: Workload, chat: Chat) -> Batch:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(workload.model_path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=workload.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
    )
    prompts = [{"prompt_token_ids": ids} for ids in requests(workload, chat)]

    def batch(number: int) -> int:
        params = [
            SamplingParams(
                max_tokens=workload.max_tokens_per_turn,
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                seed=request_seed(number, index),
            )
            for index in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return batch


def start(workload: Workload, loop: BackgroundLoop, directory: str) -> EmbeddedEngine:
    return EmbeddedEngine(
        EngineSettings(
            model=workload.model_path,
            max_model_len=workload.max_model_len,
            kv_cache_gib=KV_CACHE_GIB,
            max_num_seqs=MAX_NUM_SEQS,
        ),
        loop=loop,
        log_path=Path(directory) / "engine.log",
    )


def engine_side(workload: Workload, chat: Chat, engine: EmbeddedEngine, loop: BackgroundLoop) -> Batch:
    prompts = requests(workload, chat)

    async def all_requests(number: int) -> int:
        sampling = [
            Sampling(max_tokens=workload.max_tokens_per_turn, ignore_eos=True, seed=request_seed(number, index))
            for index in range(len(prompts))
        ]
        calls = await asyncio.gather(*map(engine.generate, prompts, sampling))
        return sum(len(call.sampled_ids) for call in calls)

    return lambda number: loop.run(all_requests(number))


def rollouts_side(workload: Workload, chat: Chat, engine: EmbeddedEngine, loop: BackgroundLoop) -> Batch:
    sampler = Sampler(
        engine=engine,
        chat=chat,
        make_environment=lambda: make_environment(workload.task),
        max_turns=workload.max_turns,
        seed=0,
    )
    sampling = Sampling(max_tokens=workload.max_tokens_per_turn, ignore_eos=True)
    rows = questions(workload)

    def batch(number: int) -> int:
        rollouts = loop.run(
            sampler.collect(rows, samples_per_prompt=workload.samples_per_prompt, sampling=sampling, step=number)
        )
        return sum(rollout.num_sampled for rollout in rollouts)

    return batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["vllm", "engine", "rollouts"])
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="tokens of every response")
    arguments = parser.parse_args()
    turn = Turn()
    tokens = arguments.tokens
    workload = replace(WORKLOADS["single_equal"], fixed_tokens=tokens, max_tokens_per_turn=tokens)
    chat = Chat.from_pretrained(workload.model_path)

    def take_turns(batch: Batch) -> None:
        for number in range(arguments.batches):
            turn.over(tokens=batch(number))

    if arguments.side == "vllm":
        take_turns(vllm_side(workload, chat))
        return
    with tempfile.TemporaryDirectory() as directory, BackgroundLoop() as loop:
        engine = start(workload, loop, directory)
        side = engine_side if arguments.side == "engine" else rollouts_side
        with gc_frozen():  # as in a run; vLLM freezes its own process
            take_turns(side(workload, chat, engine, loop))
        loop.run(engine.close())


if __name__ == "__main__":
    main()
