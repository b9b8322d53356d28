"""Conflicts between settings, and warnings about combinations that are another algorithm than their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.trainer.checks.algorithm import algorithm_problems, algorithm_warnings
from lockstep.trainer.compose import CONFIG_DIR
from tests.fixtures.composed import demo as composed


def warnings(*overrides: str) -> list[str]:
    config = composed(*overrides)
    return list(algorithm_warnings(config.algorithm, config.correction))


CONFLICTS = {
    "algorithm=maxrl algorithm.overlong_buffer=0.2": "set algorithm.overlong_buffer=0 algorithm.length_control=off",
    "algorithm=maxrl algorithm.length_control=alp": "maxrl needs rewards from 0 on",
    "algorithm=maxrl algorithm.turn_rewards=true": "needs an advantage per turn, found algorithm.advantage=maxrl",
    "algorithm=remax algorithm.length_control=kimi rollout.samples_per_prompt=1": "compares rollouts of a group",
    "+reward.settings.model.by_turn=true": "found algorithm.turn_rewards=false; set algorithm.turn_rewards=true",
    "algorithm=remax reward.functions=[novelty]": "a greedy answer, which is in no group, and reward novelty compares",
    "algorithm=ppo reward.functions=[majority_vote] rollout.samples_per_prompt=1": "set rollout.samples_per_prompt=8",
    "algorithm=vapo algorithm.gae_lambda=0.9": "set algorithm.gae_length_alpha=null, or leave algorithm.gae_lambda out",
    "algorithm=vc_ppo model.critic=shared": "set model.critic=separate or algorithm.critic_warmup=0",
}


@pytest.mark.parametrize("overrides", CONFLICTS)
def test_conflicts_are_refused_with_an_override_that_solves_them(overrides: str) -> None:
    (sentence,) = algorithm_problems(composed(*overrides.split()))
    assert CONFLICTS[overrides] in sentence


def test_group_wise_functions_of_files_are_known_by_their_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("1 / 0\n\ndef best(rollouts): ...\n\nasync def right(rollout, rollouts=None): ...\n")
    (sentence,) = algorithm_problems(composed("algorithm=remax", f"reward.functions=[{file}:right,{file}:best]"))
    assert f"reward {file}:best compares the rollouts of a group; set algorithm.advantage=grpo" in sentence
    assert not list(algorithm_problems(composed("algorithm=remax", f"reward.functions=[{file}:right]")))
    assert not list(algorithm_problems(composed("algorithm=remax", f"reward.functions=[{tmp_path}/no.py:best]")))


def test_gspo_over_tokens_weights_rollouts_by_length() -> None:
    (sentence,) = warnings("algorithm=gspo", "algorithm.normalizer=token")
    assert "set algorithm.normalizer=grpo" in sentence


@pytest.mark.parametrize("setting", ["algorithm.epochs=2", "algorithm.minibatches=2"])
def test_several_updates_of_a_loss_without_a_ratio_are_off_policy(setting: str) -> None:
    (sentence,) = warnings("algorithm=rloo", setting)
    assert "has no ratio, so 1 of the 2 updates" in sentence
    assert warnings("algorithm=grpo", setting) == []


def test_kl_cov_with_one_update_per_batch_has_no_penalty() -> None:
    (sentence,) = warnings("algorithm=kl_cov", "algorithm.minibatches=1")
    assert "set algorithm.minibatches=2" in sentence
    assert warnings("algorithm=kl_cov", "algorithm.minibatches=1", "correction=bypass") == []


@pytest.mark.parametrize("preset", sorted(path.stem for path in Path(CONFIG_DIR, "algorithm").glob("*.yaml")))
def test_presets_are_what_their_names_say(preset: str) -> None:
    assert warnings(f"algorithm={preset}") == []


def problems(*overrides: str) -> list[str]:
    return list(algorithm_problems(composed(*overrides)))


@pytest.mark.parametrize("preset", ["opd", "opd_topk"])
def test_distillation_needs_a_teacher(preset: str) -> None:
    (sentence,) = problems(f"algorithm={preset}")
    assert sentence.startswith(f"algorithm={preset} learns from a teacher, found teacher.path=null; set teacher.path=")
    assert problems(f"algorithm={preset}", "teacher.path=x") == []
    assert problems(f"algorithm={preset}", "teacher.path=x", "rollout.samples_per_prompt=1") == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm=grpo"], "is not used by algorithm=grpo; set algorithm=opd"),
        (["algorithm=opd", "rollout.temperature=0.7"], "set rollout.temperature=1"),
        (["algorithm=opd", "rollout.top_k=5", "rollout.replay_support=true"], "have no common distribution"),
        (["algorithm=ppo", "algorithm.teacher_coef=1"], "a critic, which does not learn from a teacher"),
        (["algorithm=opd", "algorithm.dynamic_sampling=true"], "set algorithm.dynamic_sampling=false"),
    ],
)
def test_a_teacher_that_cannot_teach_is_a_problem(overrides: list[str], message: str) -> None:
    (sentence,) = problems("teacher.path=x", *overrides)
    assert message in sentence


def test_the_policy_is_its_own_teacher_only_with_a_context_that_it_does_not_see_itself() -> None:
    policy = ("algorithm=opd_topk", "teacher.source=policy")
    assert problems(*policy, "teacher.context='An answer: {answer}'") == []
    (sentence,) = problems(*policy)
    assert "teaches nothing, because teacher and student are one; set teacher.context=" in sentence
    (sentence,) = problems(*policy, "teacher.context=x", "teacher.path=y")
    assert "teacher.path=y does nothing with teacher.source=policy" in sentence
    assert problems(*policy, "teacher.context=x", "rollout=colocated") == [], "engines sleep after they have scored"


def test_an_average_of_the_policy_needs_something_that_moves_it() -> None:
    average = ("algorithm=opd_topk", "teacher.source=average")
    assert problems(*average, "teacher.context='An answer: {answer}'") == []
    assert problems(*average, "teacher.context=x", "rollout=colocated") == [], "its engine does not sleep"
    assert problems(*average, "algorithm.reward_coef=1") == []
    (sentence,) = problems(*average)
    assert "nothing moves either; set teacher.context=" in sentence
    (sentence,) = problems(*average, "teacher.context=x", "teacher.path=y")
    assert "teacher.path=y does nothing with teacher.source=average" in sentence
    (sentence,) = problems("algorithm=grpo", "teacher.source=average")
    assert "with teacher.source=average is not used by algorithm=grpo" in sentence
