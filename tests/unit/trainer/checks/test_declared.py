"""Changed settings without effect are refused with the override under which they have one."""

from __future__ import annotations

import shlex

import pytest

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.declared import unused_problems
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.config.schema import Config
from lockstep.trainer.objective.declare import declared_arguments
from lockstep.trainer.setting import When, declarations
from tests.fixtures.composed import demo as composed
from tests.fixtures.pages import PAGES, bash_blocks
from tests.unit.trainer.test_cli import complete

__all__ = ["complete"]  # a fixture

REFUSED = [
    ("model.critic=shared", "does nothing with algorithm.advantage=grpo; set algorithm=ppo, or model.critic=separate"),
    ("algorithm.loss_settings={a:1}", "algorithm.loss=ppo_clip; set algorithm.loss=path/to/file.py:function, or"),
    (
        "algorithm.advantage_sha256=ab",
        "with algorithm.advantage=grpo; set algorithm.advantage=path/to/file.py:function",
    ),
    ("optimizer.critic_lr=1e-3", "set algorithm=ppo, or optimizer.critic_lr=null"),
    ("model.reference_path=org/base", "set algorithm.kl_coef=0.01, or model.reference_path=null"),
    ("rollout.stragglers=drop", "set rollout.max_staleness=1, or rollout.stragglers=wait"),
    ("correction=off correction.batch_normalize=true", "or correction.batch_normalize=false"),
    (
        "algorithm=gspo algorithm.dual_clip=3",
        "algorithm.loss=gspo; set algorithm.loss=ppo_clip, or algorithm.dual_clip=null",
    ),
    ("algorithm.turn_discount=0.9", "set algorithm.turn_rewards=true, or algorithm.turn_discount=1.0"),
    (
        "algorithm=ppo algorithm.kl_target=6",
        "algorithm.kl_place=reward algorithm.kl_coef=0.15, or algorithm.kl_target=null",
    ),
    ("model.lora.alpha=64", "model.lora.rank=0; set model.lora.rank=16, or model.lora.alpha=32.0"),
    ("model.lora.target_modules=[q_proj,v_proj]", "=[q_proj,v_proj] does nothing with model.lora.rank=0"),
    ("model.images.train_tower=true", "set model.images.max_per_prompt=1, or model.images.train_tower=false"),
    ("on_step_timeout=end step_timeout_s=0", "set step_timeout_s=1800, or on_step_timeout=report"),
    ("profile_steps=3", "set profile=true, or profile_steps=1"),
    ("resume_with_changes=true", "with resume=never; set resume=auto, or resume_with_changes=false"),
    ("rollout=server rollout.engine_restarts=3", "does nothing with rollout.engine=server"),
    ("rollout.silence_timeout_s=5", "set rollout=server"),
    ("rollout=colocated rollout.num_engines=2", "set rollout=embedded, or rollout.num_engines=1"),
    ("rollout.sleep_level=1", "set rollout=colocated"),
    ("correction=off correction.high=3", "correction.mode=off; set correction.mode=token_truncate"),
    ("correction=none correction.low=0.1", "or correction.low=0.0"),
    ("correction=none correction.alarm_kl=0.5", "set correction=off, or correction.alarm_kl=0.1"),
    ("correction=none correction.noise_floor_every=3", "or correction.noise_floor_every=10"),
    ("algorithm.kl_place=reward", "does nothing with algorithm.kl_coef=0.0; set algorithm.kl_coef=0.05"),
    ("algorithm.kl_estimator=k1", "set algorithm.kl_coef=0.05"),
    ("algorithm=rloo algorithm.kl_coef=0.1 algorithm.kl_estimator=k2", "algorithm.kl_place=reward; set"),
    ("algorithm.entropy_coef_max=0.1", "set algorithm.entropy_target=0.2, or algorithm.entropy_coef_max=1.0"),
    ("algorithm.kl_horizon=50000", "algorithm.kl_target=null; set algorithm.kl_target=6"),
    ("algorithm.gae_lambda=1.0", "set algorithm.advantage=gae, or algorithm.gae_lambda=0.95"),
    ("algorithm.gamma=0.9", "set algorithm.advantage=gae, or algorithm.gamma=1.0"),
    ("algorithm.value_coef=0.1", "algorithm.advantage=grpo; set algorithm=ppo"),
    ("algorithm.whiten_advantages=false", "set algorithm.advantage=gae, or algorithm.whiten_advantages=true"),
    ("algorithm.tau_negative=2", "algorithm.loss=ppo_clip; set algorithm.loss=sapo"),
    ("algorithm=dr_grpo algorithm.advantage_std=false", "algorithm.advantage=dr_grpo; set algorithm.advantage=grpo"),
    ("algorithm=rloo algorithm.advantage_eps=1e-3", "set algorithm.advantage=grpo"),
    ("algorithm.max_refills=5", "set algorithm.dynamic_sampling=true, or algorithm.max_refills=3"),
    ("algorithm.length_weight=2", "set algorithm.length_control=alp, or algorithm.length_weight=0.1"),
    ("algorithm.critic_warmup=3", "set algorithm=ppo, or algorithm.critic_warmup=0"),
    ("algorithm.step_weight=3", "set algorithm.advantage=gigpo, or algorithm.step_weight=1.0"),
    ("algorithm.overlong_penalty=2", "set algorithm.overlong_buffer=0.2"),
    ("algorithm.max_completion_tokens=100", "algorithm.length_control=off; set algorithm.overlong_buffer=0.2"),
    ("optimizer.spike_factor=3", "optimizer.spike=off; set optimizer.spike=skip"),
    ("optimizer.momentum=0.5", "optimizer.name=adamw; set optimizer=muon"),
    ("data.curriculum.max_pass_rate=0.9", "set data.curriculum.rest_epochs=1"),
    ("data.curriculum.rest_epochs=1 data.curriculum.min_weight=0.2", "set data.curriculum.weighting=learnability"),
    ("data.curriculum.weighting=learnability data.curriculum.hard_weight=1", "set data.curriculum.weighting=pools"),
    ("reward.isolation=thread reward.workers=8", "reward.isolation=thread; set reward.isolation=process"),
    ("logger.project=mine", "logger.wandb=off; set logger=wandb"),
    ("logger.entity=me", "logger.wandb=off; set logger=wandb"),
    ("hub.private=false", "hub.repo=null; set hub.repo=<user or organization>/<name>"),
    (
        "model.adapters={a:b}",
        "does nothing in training; set it for lockstep evaluate or lockstep serve, or model.lora.path to train an "
        "adapter further, or model.adapters={}",
    ),
    ("demonstrations.rows_per_update=3", "set demonstrations.path=conversations.jsonl, or demonstrations.rows_per"),
    ("demonstrations.split=test", "set demonstrations.path=conversations.jsonl, or demonstrations.split="),
    ("demonstrations.weight=2", "set demonstrations.path=conversations.jsonl, or demonstrations.weight="),
    ("demonstrations.min_reward=1", "set demonstrations.path=rollouts:runs/teacher, or demonstrations.min_reward=null"),
    ("demonstrations.teacher_share=0.5", "demonstrations.teacher_divergence=forward, or demonstrations.teacher_share="),
    ("algorithm.teacher_divergence_top_k=5", "set algorithm.teacher_divergence=reverse, or"),
    ("demonstrations.final_weight=2", "demonstrations.weight_schedule=linear, or demonstrations.final_weight="),
    ("algorithm.teacher_divergence_coef=2", "set algorithm.teacher_divergence=reverse"),
    ("algorithm.teacher_divergence_beta=0.3", "set algorithm.teacher_divergence=jsd"),
    ("teacher.api_key_env=KEY", "set teacher.urls=[http://127.0.0.1:8000], or teacher.api_key_env="),
    ("teacher.average_decay=0.5", "set teacher.source=average, or teacher.average_decay=0.95"),
    ("teacher.context=hint", "set teacher.source=policy, or teacher.context=null"),
    ("teacher.solved_reward=0.5", "set teacher.source=policy teacher.context="),
    ("teacher.dtype=bfloat16", "set teacher.path=models/teacher, or teacher.dtype=float32"),
    ("teacher.kv_cache_gib=1", "set teacher.path=models/teacher teacher.urls=[], or teacher.kv_cache_gib=null"),
    ("teacher.urls=[http://127.0.0.1:8001]", "set teacher.path=models/teacher"),
    (
        "algorithm=sft teacher.source=policy",
        "teacher.source=policy does nothing with algorithm.trains_on=demonstrations and demonstrations.teacher_"
        "divergence=off; set demonstrations.teacher_divergence=forward, or teacher.source=model",
    ),
    (
        "algorithm=sft algorithm.epochs=2",
        "algorithm.epochs=2 does nothing with algorithm.trains_on=demonstrations; set algorithm=grpo, or",
    ),
    ("eval.output=a.json", "does nothing in training; set it for lockstep evaluate, or eval.output=null"),
]
COUNTS = [
    "model.lora.alpha=64 model.lora.rank=8",
    "algorithm=opd teacher.path=models/teacher teacher.urls=[http://127.0.0.1:8001] rollout.silence_timeout_s=5",
    "on_step_timeout=end",
    "correction=sequence_mask correction.high=3",
    "correction=off correction.alarm_kl=0.5",
    "algorithm.kl_coef=0.1 algorithm.kl_place=reward",
    "algorithm.kl_coef=0.1 algorithm.kl_estimator=k1",
    "algorithm=rloo",
    "algorithm=ppo algorithm.gae_lambda=1.0 algorithm.value_coef=0.1",
    "algorithm=sapo algorithm.tau_negative=2",
    "algorithm=reinforce_plus_plus algorithm.advantage_eps=1e-3",
    "algorithm=dapo algorithm.max_refills=5 algorithm.overlong_penalty=2",
    "rollout.max_staleness=1 algorithm.max_refills=5",
    "algorithm=dr_grpo algorithm.max_completion_tokens=100",
    "reward.isolation=thread reward.workers=8 reward.functions=[math_equal]",
    "reward.workers=8 reward.functions=[mine.py:score]",
    "logger=wandb logger.project=mine",
    "logger=mlflow logger.project=mine logger.group=lr",
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=lambda value: value.split()[-1])
def test_a_setting_without_effect_is_refused_with_an_override_that_gives_it_one(
    words: str, sentence: str, complete: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        validate(composed(*complete, *words.split()))
    (problem,) = str(error.value).splitlines()
    assert sentence in problem


@pytest.mark.parametrize("words", COUNTS)
def test_a_setting_with_an_effect_is_accepted(words: str) -> None:
    assert not list(unused_problems(composed(*words.split())))


CONDITIONAL = {name: declared for name, (declared, _) in declarations(Config()).items() if declared.when is not None}
CONDITIONS = {id(declared.when): declared.when for declared in CONDITIONAL.values()}


@pytest.mark.parametrize("when", CONDITIONS.values(), ids=lambda when: when.instead)
def test_the_suggested_overrides_fulfill_the_condition(when: When) -> None:
    if when.instead.startswith("it for") or " with " in when.instead:  # not an override alone
        return
    assert when.holds(composed(*when.instead.replace("<user or organization>/<name>", "me/it").split()))


def test_every_condition_is_covered_by_a_refused_setting() -> None:
    changed = {word.partition("=")[0] for words, _ in REFUSED for word in words.split()}
    tried = {id(CONDITIONAL[name].when) for name in changed & CONDITIONAL.keys()}
    derived = {id(CONDITIONAL[f"algorithm.{name}"].when) for name in declared_arguments()}
    assert not [when.instead for key, when in CONDITIONS.items() if key not in tried | derived]


def test_every_cause_is_a_setting() -> None:
    names = declarations(Config())
    for declared in CONDITIONAL.values():
        assert all(cause in names for cause in declared.when.because)


def test_defaults_are_never_refused() -> None:
    assert not list(unused_problems(Config()))


def test_an_evaluation_accepts_a_path_for_its_results(complete: tuple[str, ...], tmp_path) -> None:
    config = composed(*complete, f"data.heldout_path={tmp_path}/rows.jsonl", f"eval.output={tmp_path}/results.json")
    validate(config, trains=False)


PAGE_RUNS = [
    shlex.split(command.partition("lockstep train ")[2], comments=True)
    for page in PAGES
    for block in bash_blocks(page)
    for command in block.commands
    if "lockstep train " in command and not block.is_mistake
]


@pytest.mark.parametrize("words", PAGE_RUNS, ids=" ".join)
def test_every_setting_in_a_command_of_a_page_has_an_effect(words: list[str]) -> None:
    overrides = [word.replace("$lr", "1e-3") for word in words if "=" in word and not word.endswith("=...")]
    assert not list(unused_problems(composed(*overrides)))
