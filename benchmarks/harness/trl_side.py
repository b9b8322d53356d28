"""TRL's side of a comparison: `GRPOTrainer` of TRL 1.16 on the same workload, waiting for its turn after each update.

Settings of the computation are translated from the configuration of Lockstep's side: model, chat template, rows and
their order, batch, sampling, reward functions, clip, optimizer, seed. Both divide advantages by the group's standard
deviation, and the loss by all tokens of the batch (TRL's `dapo`). Settings of speed alone are the fastest found: no
gradient checkpointing, few passes, SDPA, no reports. Several turns use its `tools=`. When it generates
with transformers, TRL neither scores old logprobs nor corrects for the sampler, and so does less work than Lockstep.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from harness.ranks import start_other_ranks
from harness.turns import Turn
from harness.workloads import COMPARED, PEER_ENGINES, TOOL_TOKENS, configuration
from lockstep.rewards.batches import Scope
from lockstep.rewards.resolve import resolve
from lockstep.rollout.environments.demo.calculator import calculator
from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.records import Rollout
from lockstep.trainer.build import make_chat
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.prompts import Prompts, training_data

TOOLS: dict[str, list[Callable[..., Any]]] = {"calculator": [calculator]}
"""Tools of each environment that has some."""


def dataset_of(config: Config, updates: int) -> Dataset:
    """Return the rows of these updates in the order in which Lockstep draws them."""
    data = training_data(config.data, config.environment, config.reward)
    prompts = Prompts(data, seed=config.seed, shuffle=config.data.shuffle)
    rows = prompts.take(updates * config.rollout.prompts_per_step)
    reader = PromptReader(column=config.environment.settings.get("prompt_column"))
    return Dataset.from_list([{"prompt": list(reader.messages(row)), "row": json.dumps(dict(row))} for row in rows])


def reward_of(config: Config) -> Callable[..., list[float]]:
    """Return the reward function of the configuration in TRL's form: Lockstep's own, on the same messages."""
    (name,) = config.reward.functions
    function = resolve(name, config.reward.settings.get(name, {}))

    def reward(
        prompts: list[list[dict[str, Any]]], completions: list[list[dict[str, Any]]], row: list[str], **_: Any
    ) -> list[float]:
        rollouts = [
            Rollout(rollout_id=index, group_id=0, calls=(), messages=(*prompt, *completion), example=json.loads(text))
            for index, (prompt, completion, text) in enumerate(zip(prompts, completions, row, strict=True))
        ]
        if function.scope is Scope.ROLLOUT:
            return [reward for rollout in rollouts for reward in function.calling([rollout])()]
        return function.calling(rollouts)()

    return reward


def config_of(config: Config, *, engine: str, updates: int, micro_batch: int, ranks: int, output: str) -> GRPOConfig:
    """Translate the settings. micro_batch: rollouts in one pass of all ranks together."""
    sampling, algorithm, optimizer = config.rollout, config.algorithm, config.optimizer
    batch = sampling.prompts_per_step * sampling.samples_per_prompt
    generation: dict[str, Any] = {}
    if engine == "vllm":
        generation["max_tokens"] = sampling.max_tokens_per_turn
        if sampling.ignore_eos:
            generation["ignore_eos"] = True
    else:
        generation["max_new_tokens"] = sampling.max_tokens_per_turn
        if sampling.ignore_eos:
            generation["min_new_tokens"] = sampling.max_tokens_per_turn
    return GRPOConfig(
        output_dir=output,
        # Update
        loss_type="dapo",
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        beta=algorithm.kl_coef,
        scale_rewards="group",
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        max_steps=updates,
        # Rollouts
        shuffle_dataset=False,
        num_generations=sampling.samples_per_prompt,
        per_device_train_batch_size=micro_batch // ranks,
        gradient_accumulation_steps=batch // micro_batch,
        max_completion_length=config.max_turns * (sampling.max_tokens_per_turn + TOOL_TOKENS),
        max_tool_calling_iterations=config.max_turns - 1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        generation_kwargs=generation,
        use_vllm=engine == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=sampling.max_model_len,
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
        seed=config.seed,
    )


class AfterEachUpdate(TrainerCallback):
    """Ends the turn when an update is logged, which is the last step of an update in TRL."""

    def __init__(self, turn: Turn, batch: int) -> None:
        self._turn = turn
        self._batch = batch

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._turn.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "completions/mean_length" in logs:
            self._turn.over(
                trained_tokens=round(float(logs["completions/mean_length"]) * self._batch),
                longest=float(logs["completions/max_length"]),
                reward=float(logs["reward"]),
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=COMPARED)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--engine", choices=PEER_ENGINES, default="transformers")
    parser.add_argument("--micro-batch", type=int, help="rollouts in one pass (default: the workload's)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--save-to", help="directory for the trained model")
    parser.add_argument("settings", nargs="*", help="further settings of Lockstep's side to translate")
    arguments = parser.parse_intermixed_args()
    turn = Turn()
    start_other_ranks(arguments.ranks)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    workload = COMPARED[arguments.workload]
    config = configuration([*workload.settings(), *arguments.settings])
    batch = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    tokenizer = make_chat(config.model, history=config.environment.history).tokenizer
    tokenizer.response_template = qwen3_template  # of templates that write calls and reasoning as Qwen3's does
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=config.model.path,
            reward_funcs=reward_of(config),
            args=config_of(
                config,
                engine=arguments.engine,
                updates=arguments.updates,
                micro_batch=arguments.micro_batch or workload.micro_batch or batch,
                ranks=arguments.ranks,
                output=output,
            ),
            train_dataset=dataset_of(config, arguments.updates),
            processing_class=tokenizer,
            tools=TOOLS.get(config.environment.name),
            callbacks=[AfterEachUpdate(turn, batch)],
        )
        trainer.train()
        if arguments.save_to:
            trainer.save_model(arguments.save_to)


if __name__ == "__main__":
    main()
