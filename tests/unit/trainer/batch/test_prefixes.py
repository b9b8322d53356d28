"""Shared prefixes: computed tokens, plans that keep rows together, and gradients equal to those of separate rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lockstep.rollout.records import EngineCall, FinishReason, Rollout, VersionSpan
from lockstep.trainer.batch.assignment import plan
from lockstep.trainer.batch.packing import collate
from lockstep.trainer.batch.prefix_bundles import plan_bundles
from lockstep.trainer.batch.prefixes import MIN_SHARED, shared
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.critic_credit import critic_targets
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Logprobs, rollout_targets
from lockstep.trainer.model.critic import ActorCritic, Critic
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank
from tests.fixtures.families import FAMILIES
from tests.integration.workers.gradients import settings_of

PRESETS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "clipped_tis", "rloo", "remax")


def random_ids(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 200, length)


PROMPT, HISTORY = random_ids(0, 40), random_ids(1, 20)
ALIKE = {
    "a prompt": [np.concatenate([PROMPT, random_ids(seed, 10 + seed)]) for seed in range(2, 6)],
    "a prompt and a history": [
        np.concatenate([PROMPT, HISTORY, random_ids(2, 9)]),
        np.concatenate([PROMPT, random_ids(3, 12)]),
        np.concatenate([PROMPT, HISTORY, random_ids(4, 5)]),
    ],
    "everything": [PROMPT, PROMPT],
    "all of the shorter one": [np.concatenate([PROMPT, HISTORY]), PROMPT],
    "nothing": [random_ids(seed, 30) for seed in range(3)],
    "too little": [np.concatenate([PROMPT[: MIN_SHARED - 1], random_ids(seed, 9)]) for seed in range(2, 5)],
}
COMPUTED = {
    "a prompt": 40 + 12 + 13 + 14 + 15,
    "a prompt and a history": 40 + 20 + 9 + 12 + 5,
    "everything": 40,
    "all of the shorter one": 60,
    "nothing": 90,
    "too little": 3 * (MIN_SHARED - 1 + 9),
}


@pytest.mark.parametrize("what", ALIKE)
def test_a_shared_prefix_is_computed_once(what: str) -> None:
    stretches = shared(ALIKE[what])
    assert len(stretches.ids) == sum(stretches.lengths) == COMPUTED[what]
    assert_paths(stretches, ALIKE[what])


@pytest.mark.usefixtures("_every_token_counts")
@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12))
@settings(max_examples=300, deadline=None)
def test_every_row_is_a_path_through_the_stretches(rows: list[list[int]]) -> None:
    arrays = [np.array(row) for row in rows]
    assert_paths(shared(arrays), arrays)
    assert len(shared(arrays).ids) == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@pytest.fixture(scope="module")
def _every_token_counts():
    """Lower the threshold so that short rows share prefixes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.trainer.batch.prefixes.MIN_SHARED", 1)
        yield


def assert_paths(stretches: Any, rows: list[np.ndarray]) -> None:
    """The places of each row hold its ids at its positions, and the prefix of a stretch is its row's."""
    starts = np.cumsum([0, *stretches.lengths])
    for row, place in zip(rows, stretches.places, strict=True):
        np.testing.assert_array_equal(stretches.ids[place], row)
        np.testing.assert_array_equal(stretches.position_ids[place], np.arange(len(row)))
    for index, (length, prefix) in enumerate(zip(stretches.lengths, stretches.prefixes, strict=True)):
        assert all(0 < tokens <= stretches.lengths[earlier] and earlier < index for earlier, tokens in prefix)
        seen = [np.arange(starts[earlier], starts[earlier] + tokens) for earlier, tokens in prefix]
        own = np.arange(starts[index], starts[index] + length)
        path = np.concatenate([*seen, own])
        assert any(np.array_equal(path, place[: len(path)]) for place in stretches.places)


# Plans


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=24), st.integers(1, 4), st.integers(1, 150))
@settings(max_examples=200, deadline=None)
def test_plans_hold_every_row_once_and_packs_their_budget(kinds, num_ranks: int, budget: int) -> None:
    rows = [
        np.concatenate([random_ids(kind, 20 * kind), random_ids(i + 9, own)]) for i, (kind, own) in enumerate(kinds)
    ]
    made = plan_bundles(rows, num_ranks=num_ranks, token_budget=budget)
    packs = [pack for packs in made.microbatches for pack in packs]
    assert sorted(i for pack in packs for i in pack) == list(range(len(rows)))
    assert {len(packs) for packs in made.microbatches} == {made.num_microbatches}
    for pack in packs:
        assert len(pack) <= 1 or len(shared([rows[i] for i in pack]).ids) <= budget
    assert made.cost <= plan([len(row) for row in rows], num_ranks=num_ranks, token_budget=budget).cost * 1.34
    assert made == plan_bundles(rows, num_ranks=num_ranks, token_budget=budget)


def test_a_group_stays_together_unless_ranks_would_wait() -> None:
    groups = [np.concatenate([random_ids(group, 100), random_ids(9 + i, 10)]) for group in range(2) for i in range(4)]
    together = plan_bundles(groups, num_ranks=2, token_budget=1000)
    assert {frozenset(pack) for (pack,) in together.microbatches} == {frozenset(range(4)), frozenset(range(4, 8))}
    assert together.shared_fraction == pytest.approx(600 / 880)
    (first,), (second,) = plan_bundles(groups[:4], num_ranks=2, token_budget=1000).microbatches
    assert len(first) == len(second) == 2


def test_rows_without_shared_prefixes_get_the_plain_plan() -> None:
    rows = [random_ids(seed, 20 + 7 * seed) for seed in range(12)]
    partition = {"num_ranks": 2, "token_budget": 120}
    ours, plain = plan_bundles(rows, **partition), plan([len(row) for row in rows], **partition)
    assert ours.cost == plain.cost
    assert ours.shared_fraction == 0.0


# Gradients


def call(prompt: np.ndarray, seed: int, length: int, alike: int = 0) -> EngineCall:
    rng = np.random.default_rng(seed)
    sampled = np.concatenate([random_ids(99, alike), rng.integers(5, 200, length)])
    return EngineCall(
        prompt_ids=tuple(prompt.tolist()),
        sampled_ids=tuple(sampled.tolist()),
        sampled_logprobs=tuple((-6 + rng.normal(0, 0.3, len(sampled))).clip(max=0).tolist()),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=0, start=0, end=len(sampled)),),
    )


def rollouts() -> list[Rollout]:
    """Return two groups: samples of one prompt, among them two with a common beginning, two equal, two that branch."""
    made = []
    for rollout_id in range(8):
        prompt = random_ids(rollout_id // 4, 30)
        alike = 18 * (rollout_id in (1, 2))
        calls = [call(prompt, 7 if rollout_id in (5, 6) else rollout_id, 3 + 2 * rollout_id, alike)]
        calls[0] = call(prompt, 7, 12) if rollout_id in (5, 6) else calls[0]
        if rollout_id in (3, 7):
            history = np.array(calls[0].all_ids)
            calls += [call(np.concatenate([history, [7, 8, 9 + branch]]), 20 + branch, 6) for branch in range(2)]
        made.append(
            Rollout(rollout_id=rollout_id, group_id=rollout_id // 4, calls=tuple(calls), reward=float(rollout_id % 3))
        )
    return made


@pytest.fixture(scope="module")
def batch() -> StepBatch:
    greedy_rewards = dict.fromkeys(range(2), 0.5)
    return StepBatch.of(rollouts(), mask_truncated=False, greedy_rewards=greedy_rewards)


def gradient(module: Any, batch: StepBatch, config: Config) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the float64 gradient of all trained parameters, and the metrics, of one update."""
    distributed = FakeRank(module)
    updater = Updater(module, distributed, config)
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=(3, batch.layout.num_tokens))).float()
    base_N = torch.full((batch.layout.num_tokens,), -5.0)
    # Off-policy on purpose: ratios must differ from 1, or clipping and sequence ratios would have no effect.
    logprobs = Logprobs(
        old=Recomputed(base_N + 0.5 * noise[0]),
        ref_N=base_N + 0.2 * noise[1],
        values_N=0.3 * noise[2] if config.plan.has_critic else None,
    )
    correction = StepCorrection.of(batch, logprobs.old, config.correction)
    if config.plan.has_critic:
        targets = critic_targets(batch, logprobs, correction, config.algorithm, kl_coef=0.1).targets
    else:
        targets = rollout_targets(batch, logprobs, correction, config.algorithm)[0]
    updated = updater.update(batch, targets)
    return distributed.gradient, dict(updated.metrics)


def settings_with(preset: str, *, share: str, token_budget: int = 100_000) -> Config:
    ppo = {"advantage": "gae", "clip_low": 0.05, "clip_high": 0.1, "kl_coef": 0.1, "kl_place": "reward"}
    algorithm = AlgorithmConfig(**ppo, value_coef=0.3) if preset == "ppo" else settings_of(preset)
    config = Config(algorithm=algorithm, token_budget=token_budget, share_prefixes=share)
    config.correction.logp_old = "given"
    return config


def assert_equal_gradients(module: Any, batch: StepBatch, preset: str, *, tolerance: float = 1e-10) -> None:
    expected, plain = gradient(module, batch, settings_with(preset, share="never"))
    assert plain["perf/shared_tokens_frac"] == 0.0
    assert float(expected.norm()) > 1e-4, "there is no gradient, so nothing is compared"
    for token_budget in (100_000, 90):
        found, metrics = gradient(module, batch, settings_with(preset, share="always", token_budget=token_budget))
        assert metrics["perf/shared_tokens_frac"] > 0.2, "nothing was shared, so nothing is compared"
        assert float((found - expected).norm() / expected.norm()) < tolerance
        assert metrics["policy/loss"] == pytest.approx(plain["policy/loss"], rel=tolerance)


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """Return a model in float64 throughout: the norms of newer families round to float32."""
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=512, n_positions=128, initializer_range=0.2)
    return GPT2LMHeadModel(config).double()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(gpt2())


@pytest.mark.parametrize("preset", PRESETS)
def test_shared_prefixes_give_the_gradient_of_separate_rows(preset: str, policy: Policy, batch: StepBatch) -> None:
    assert_equal_gradients(policy, batch, preset)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_shared_prefixes_give_the_gradient_of_policy_and_critic(critic: str, batch: StepBatch) -> None:
    policy = Policy(gpt2())
    module = ActorCritic(policy, Critic(gpt2(1).transformer).double()) if critic == "separate" else None
    module = module or ActorCritic.shared(policy)
    head = module.critic.head if isinstance(module.critic, Critic) else module.critic
    torch.nn.init.normal_(head.linear.weight, std=0.3)
    assert_equal_gradients(module, batch, "ppo")


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mistral", "gpt_oss", "qwen3_moe", "llama4"])
def test_windows_softcaps_sinks_chunks_and_experts_keep_the_gradient(family: str, batch: StepBatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    assert_equal_gradients(Policy(model), batch, "grpo", tolerance=1e-5)


def test_checkpointed_layers_keep_the_gradient(batch: StepBatch) -> None:
    assert_equal_gradients(Policy(gpt2(), gradient_checkpointing=True), batch, "grpo")


@pytest.mark.parametrize("long_stretch", [0, 1000])
def test_recomputed_and_masked_prefixes_give_the_same_gradient(
    long_stretch: float, policy: Policy, batch: StepBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention recomputes the prefix as part of a causal row, or uses a mask."""
    monkeypatch.setattr("lockstep.trainer.model.layers.packed_attention.LONG_STRETCH", long_stretch)
    assert_equal_gradients(policy, batch, "grpo")


def test_attention_without_support_for_prefixes_gets_whole_rows(batch: StepBatch) -> None:
    policy = Policy(gpt2(), attn_implementation="sdpa")
    _, metrics = gradient(policy, batch, settings_with("grpo", share="auto"))
    assert metrics["perf/shared_tokens_frac"] == 0.0
    with pytest.raises(AssertionError, match="can_share_prefixes"):
        policy(collate(batch.rows, range(len(batch.rows)), batch.layout, share_prefixes=True))
