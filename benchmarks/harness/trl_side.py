"""TRL's side of a comparison: `GRPOTrainer` of TRL 1.16 on the same workload, waiting for its turn after each update.

Settings of the computation are those of Lockstep's demo: GRPO advantages divided by the group's standard deviation, a
clip of 0.2 and 0.28, one denominator over all tokens of the batch (TRL's `dapo`), no KL term, AdamW with the same
rates. Settings of speed alone are the fastest found: no gradient checkpointing, the whole batch in one pass, SDPA, no
reports. Several turns use its `tools=`. When it generates with transformers, TRL neither scores old logprobs nor
corrects for the sampler, and so does less work than Lockstep.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from harness.ranks import start_other_ranks
from harness.sentence import is_right
from harness.turns import Turn
from harness.workloads import PEER_ENGINES, WORKLOADS, Workload
from rollout.environments.calculator import calculator


def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: Any) -> list[float]:
    """Return rewards in TRL's form."""
    return [
        float(is_right(str(messages[-1]["content"]), expected))
        for messages, expected in zip(completions, answer, strict=True)
    ]


def config_of(
    workload: Workload, *, engine: str, updates: int, micro_batch: int, ranks: int, output: str
) -> GRPOConfig:
    generation: dict[str, Any] = {}
    if engine == "vllm":
        generation["max_tokens"] = workload.max_tokens_per_turn
        if workload.fixed_tokens is not None:
            generation["ignore_eos"] = True
    else:
        generation["max_new_tokens"] = workload.max_tokens_per_turn
        if workload.fixed_tokens is not None:
            generation["min_new_tokens"] = workload.fixed_tokens
    return GRPOConfig(
        output_dir=output,
        # Update
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        scale_rewards="group",
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=updates,
        # Rollouts
        num_generations=workload.samples_per_prompt,
        per_device_train_batch_size=micro_batch // ranks,
        gradient_accumulation_steps=workload.batch // micro_batch,
        max_completion_length=workload.horizon,
        max_tool_calling_iterations=workload.max_turns - 1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs=generation,
        use_vllm=engine == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=workload.max_model_len,
        use_transformers_continuous_batching=engine == "paged",
        # Speed
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )


class AfterEachUpdate(TrainerCallback):
    """Ends the turn when an update is logged, which is the last step of an update in TRL."""

    def __init__(self, turn: Turn, workload: Workload) -> None:
        self._turn = turn
        self._batch = workload.batch

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "completions/mean_length" in logs:
            self._turn.over(
                trained_tokens=round(float(logs["completions/mean_length"]) * self._batch),
                longest=float(logs["completions/max_length"]),
                reward=float(logs["reward"]),
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--engine", choices=PEER_ENGINES, default="transformers")
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    turn = Turn()
    start_other_ranks(arguments.ranks)
    torch.set_num_threads(arguments.threads)
    workload = WORKLOADS[arguments.workload]
    tokenizer = AutoTokenizer.from_pretrained(workload.model_path)
    tokenizer.response_template = qwen3_template  # the demo's template writes calls and reasoning as Qwen3's does
    rows = [json.loads(line) for line in workload.data_path.read_text().splitlines()]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=str(workload.model_path),
            reward_funcs=reward,
            args=config_of(
                workload,
                engine=arguments.engine,
                updates=arguments.updates,
                micro_batch=arguments.micro_batch,
                ranks=arguments.ranks,
                output=output,
            ),
            train_dataset=dataset,
            processing_class=tokenizer,
            tools=[calculator] if workload.max_turns > 1 else None,
            callbacks=[AfterEachUpdate(turn, workload)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
