"""Settings of evaluations: `eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.trainer.config.conditions import EVALUATE_SCRIPT
from lockstep.trainer.setting import setting


@dataclass
class LmEvalConfig:
    tasks: list[str] = setting(
        [],
        "tasks of lm-eval to evaluate in place of data.heldout_path: names, patterns or files",
        when=EVALUATE_SCRIPT,
        experimental="it follows the interface of lm-eval 0.4",
    )
    include_path: str | None = setting(
        None, "directory of further task files; null: none", is_path=True, when=EVALUATE_SCRIPT
    )
    num_fewshot: int | None = setting(
        None, "examples in a prompt; null: the task's own number", low=0, when=EVALUATE_SCRIPT
    )
    apply_chat_template: bool = setting(False, "render prompts with the chat template", when=EVALUATE_SCRIPT)
    fewshot_as_multiturn: bool = setting(
        False, "with the chat template: write examples as turns of a conversation", when=EVALUATE_SCRIPT
    )
    system_instruction: str | None = setting(None, "system prompt; null: none", when=EVALUATE_SCRIPT)
    gen_kwargs: dict[str, Any] = setting(
        {}, "generation settings in place of the tasks' own, for example {max_gen_toks: 2048}", when=EVALUATE_SCRIPT
    )
    confirm_run_unsafe_code: bool = setting(
        False, "run programs of the model without isolation, for tasks that do", when=EVALUATE_SCRIPT
    )


@dataclass
class EvalConfig:
    every: int = setting(0, "updates between evaluations on held-out data, also after the last update; 0: never", low=0)
    before_training: bool = setting(False, "evaluate before the first update and after the last one")
    sets: dict[str, Any] = setting(
        {}, "further held-out data by name, with metrics eval/<name>/... (docs/evaluation.md)"
    )
    prompts: int | None = setting(128, "number of prompts from the start of each data set; null: all", low=1)
    samples_per_prompt: int = setting(1, "rollouts per held-out prompt, n of pass@k and mean@n", low=1)
    temperature: float = setting(0.0, "0: greedy", low=0)
    top_p: float = setting(1.0, "nucleus", low=0, high=1)
    top_k: int = setting(0, "0: off", low=0)
    min_p: float = setting(0.0, "0: off", low=0, high=1)
    max_tokens_per_turn: int | None = setting(
        None, "maximum number of sampled tokens per assistant turn [tokens]; null: rollout.max_tokens_per_turn", low=1
    )
    pass_threshold: float = setting(1.0, "lowest reward of a rollout that passes")
    pass_reward: str | None = setting(None, "reward function compared with pass_threshold; null: the weighted sum")
    by: str = setting("environment", "column whose values break the results down, in data that has it")
    compare_to: str | None = setting(
        None,
        "lockstep evaluate: model, or JSON file of its evaluation, to compare with on the same seeds",
        is_path=True,
        when=EVALUATE_SCRIPT,
    )
    output: str | None = setting(
        None, "lockstep evaluate: JSON file for results, with rollouts beside it as .jsonl", when=EVALUATE_SCRIPT
    )
    lm_eval: LmEvalConfig = field(default_factory=LmEvalConfig)
