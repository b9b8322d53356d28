"""Names that are not settings: those of other trainers with the settings here, and misspelled ones.

Loaded after a mistake only.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

RENAMED = {
    "learning_rate": "optimizer.lr",
    "warmup_steps": "optimizer.warmup_updates",
    "num_generations": "rollout.samples_per_prompt",
    "n": "rollout.samples_per_prompt",
    "train_batch_size": "rollout.prompts_per_step",
    "batch_size": "rollout.prompts_per_step",
    "max_completion_length": "rollout.max_tokens_per_turn",
    "max_response_length": "rollout.max_tokens_per_turn",
    "max_new_tokens": "rollout.max_tokens_per_turn",
    "max_tokens": "rollout.max_tokens_per_turn",
    "max_prompt_length": "data.max_prompt_tokens",
    "vllm_max_model_length": "rollout.max_model_len",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "mask_truncated_completions": "rollout.mask_truncated",
    "max_steps": "updates",
    "steps": "updates",
    "total_training_steps": "updates",
    "save_steps": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "output_dir": "run_root",
    "save_dir": "run_root",
    "logging_dir": "run_root",
    "shuffle_dataset": "data.shuffle",
    "num_iterations": "algorithm.epochs",
    "ppo_epochs": "algorithm.epochs",
    "beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "target_kl": "algorithm.kl_target",
    "horizon": "algorithm.kl_horizon",
    "lam": "algorithm.gae_lambda",
    "entropy_coef_delta": "algorithm.entropy_coef_step",
    "router_aux_loss_coef": "algorithm.router_aux_coef",
    "router_z_loss_coef": "algorithm.router_z_coef",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "norm_adv_by_std_in_grpo": "algorithm.advantage_std",
    "vllm_importance_sampling_clip_max": "correction.high",
    "vllm_importance_sampling_clip_min": "correction.low",
    "rollout_is_threshold": "correction.high",
    "reward_weights": "reward.weights",
    "max_assistant_turns": "environment.max_turns",
}
"""Settings by the last part of their names in TRL and verl (docs/migrating.md); the values are the same."""
REPLACED = {
    "dataset": "data.path",
    "train_dataset": "data.path",
    "eval_dataset": "data.heldout_path",
    "reward_fn": "reward.functions",
    "reward_func": "reward.functions",
    "reward_funcs": "reward.functions",
    "custom_reward_function": "reward.functions",
    "reward_kwargs": "reward.settings",
    "environment_factory": "environment",
    "rollout_func": "environment",
    "max_tool_calling_iterations": "environment.max_turns",
    "loss_type": "algorithm",
    "importance_sampling_level": "algorithm",
    "adv_estimator": "algorithm",
    "scale_rewards": "algorithm.advantage",
    "loss_agg_mode": "algorithm.normalizer",
    "loss_mode": "algorithm.loss",
    "kl_loss_type": "algorithm.kl_estimator",
    "use_kl_loss": "algorithm.kl_coef",
    "use_kl_in_reward": "algorithm.kl_place",
    "use_bias_correction_kl": "algorithm.kl_estimator",
    "use_adaptive_entropy": "algorithm.entropy_target",
    "off_policy_mask_threshold": "algorithm.off_policy_kl",
    "top_entropy_quantile": "algorithm.entropy_fraction",
    "steps_per_generation": "algorithm.minibatches",
    "ppo_mini_batch_size": "algorithm.minibatches",
    "generation_batch_size": "rollout.prompts_per_step",
    "per_device_train_batch_size": "token_budget",
    "gradient_accumulation_steps": "token_budget",
    "use_dynamic_bsz": "token_budget",
    "ppo_max_token_len_per_gpu": "token_budget",
    "num_train_epochs": "updates",
    "lr_scheduler_type": "optimizer.schedule",
    "bf16": "model.dtype",
    "peft_config": "model.lora",
    "use_vllm": "rollout",
    "vllm_mode": "rollout",
    "vllm_gpu_memory_utilization": "rollout.kv_cache_gib",
    "vllm_importance_sampling_mode": "correction",
    "rollout_is": "correction",
    "rollout_rs": "correction.rejection",
    "log_completions": "logger.print_rollouts",
    "report_to": "logger",
    "logging_steps": "logger",
    "resume_mode": "resume",
}
"""The same for names whose values have another meaning or another unit."""
MIGRATING = "docs/migrating.md has the names and values of TRL and verl"


def replacement(word: str, words: Sequence[str]) -> str | None:
    """Return the setting that takes the place of one of another trainer, whose values differ; else None."""
    last = word.rpartition(".")[2]
    own = [name for name in words if name.rpartition(".")[2] == last]
    other = None if own else REPLACED.get(last)
    return other if other in words else None


def closest_name(word: str, words: Sequence[str]) -> str | None:
    """Return a similar word, or the name here of a setting of another trainer; None if there is neither."""
    last = word.rpartition(".")[2]
    ends = [name for name in words if name.rpartition(".")[2] == last]
    # A section of ours that has several settings of this name is meant as it is typed.
    other = RENAMED.get(last) if word == last or not ends else None
    if other in words:
        return other
    if len(ends) == 1 and "." in ends[0]:
        return ends[0]
    if other := replacement(word, words):
        return other
    if word and (starts := [name for name in words if name.startswith(word)]):
        return starts[0]
    if swapped := [name for name in words if sorted(name) == sorted(word)]:
        return swapped[0]
    return next(iter(difflib.get_close_matches(word, words, n=1)), None)
