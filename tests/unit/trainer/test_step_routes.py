"""Steps with routing replay: the engine's experts in all passes of the policy, or those of its old-policy pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, Routes
from lockstep.trainer.batch.batch_bytes import decode, encode
from lockstep.trainer.batch.dealt_batch import dealt
from lockstep.trainer.batch.packing import PackedBatch, collate
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.collect.source import Collected
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.model.lora import add_adapters
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.reference import Reference
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.step import Trainer
from lockstep.trainer.stopwatch import Stopwatch
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, on_ranks
from tests.fixtures.families import FAMILIES
from tests.unit.trainer.test_step_bypass import NoEngine


def a_policy() -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"]()))


def rollouts(*, with_routes: bool = True) -> list[Rollout]:
    """Make two groups of two rollouts, of two turns each; prompts of a group are equal and long enough to be shared."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(5, 200, 20).tolist()) for _ in range(2)]

    def call(prompt: tuple[int, ...], length: int, index: int) -> EngineCall:
        own = np.random.default_rng(index % 2).integers(0, 4, (200, 2, 1))  # equal in a shared prompt
        routes = np.concatenate([own, (own + 1) % 4], 2).astype(np.uint8)[: len(prompt) + length - 1]
        return EngineCall(
            prompt_ids=prompt,
            sampled_ids=tuple(rng.integers(5, 200, length).tolist()),
            sampled_logprobs=tuple((-6 + rng.normal(0, 0.5, length)).tolist()),
            finish_reason=FinishReason.STOP,
            routes=Routes(own=routes) if with_routes else None,
        )

    made = []
    for index, length in enumerate((7, 12, 5, 9)):
        first = call(prompts[index // 2], length, index // 2)
        second = call((*first.all_ids, 3, 4), 4, index // 2)
        made.append(Rollout(rollout_id=index, group_id=index // 2, calls=(first, second), reward=float(index % 2)))
    return made


class Given:
    def __init__(self, *, with_routes: bool) -> None:
        self._with_routes = with_routes

    def collect(self, step: int, version: int, watch: Stopwatch, on_rollout: Any = None) -> Collected:
        with watch.stage("rollout"):
            sampled = tuple(rollouts(with_routes=self._with_routes))
        with watch.stage("reward"):
            return Collected(rollouts=sampled, trained=sampled)


class SteppingRank(FakeRank):
    """A rank whose optimizer moves the parameters."""

    def step(self, lr: float, grad_norm: float, *, critic_only: bool = False) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.5 * parameter.grad
        super().step(lr, grad_norm)


def passes_of_a_step(replay: str, *, with_routes: bool, minibatches: int = 2) -> list[tuple[PackedBatch, Tensor, bool]]:
    """Return pack, chosen experts and grad mode of each forward pass of a step with several updates."""
    policy = a_policy()
    seen: list[tuple[PackedBatch, Tensor, bool]] = []
    of_layers: list[Tensor] = []
    for layer in policy.causal_lm.get_decoder().layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, output: of_layers.append(output[2].clone()))
    forward = policy.hidden_states

    def traced(packed: PackedBatch) -> Tensor:
        of_layers.clear()
        hidden_LD = forward(packed)
        seen.append((packed, torch.stack(of_layers, 1), torch.is_grad_enabled()))
        return hidden_LD

    config = Config(algorithm=AlgorithmConfig(minibatches=minibatches))
    config.correction.routing_replay = replay
    config.correction.noise_floor_every = 0
    distributed = SteppingRank(policy)
    trainer = Trainer(
        config,
        distributed=distributed,
        updater=Updater(policy, distributed, config),
        rollouts=Given(with_routes=with_routes),  # type: ignore[arg-type]
        reference=None,
        sync=NoEngine(),  # type: ignore[arg-type]
    )
    policy.hidden_states = traced  # type: ignore[method-assign]
    trainer.step()
    return seen


def test_the_engine_s_experts_are_used_in_scoring_and_in_updates() -> None:
    passes = passes_of_a_step("engine", with_routes=True)
    assert [has_grad for *_, has_grad in passes] == [False, True, True]
    for packed, chosen, _ in passes:
        assert packed.routes is not None
        is_known = packed.routes[:, 0, 0] >= 0
        assert int((~is_known).sum()) == packed.num_rows, "only the last token of each row has no route"
        assert torch.equal(chosen[is_known].short(), packed.routes[is_known])


def test_the_old_policy_s_experts_are_used_in_updates() -> None:
    passes = passes_of_a_step("old", with_routes=False)
    scoring, *updates = passes
    assert scoring[0].routes is None
    for packed, chosen, has_grad in updates:
        assert has_grad
        assert packed.routes is not None
        assert torch.equal(chosen.short(), packed.routes)
        assert (packed.routes >= 0).all()
    off = passes_of_a_step("off", with_routes=False)
    assert all(packed.routes is None for packed, *_ in off)
    assert torch.equal(off[0][1], scoring[1])
    assert not torch.equal(off[-1][1], updates[-1][1]), "the first update flips no route: the test shows nothing"


def test_without_replay_the_routes_of_saved_rollouts_are_left_out() -> None:
    assert all(packed.routes is None for packed, *_ in passes_of_a_step("off", with_routes=True))


def test_rollouts_without_routes_are_refused() -> None:
    with pytest.raises(EvidenceError, match="4 of 4 rows have no routed experts of the engine"):
        passes_of_a_step("engine", with_routes=False)


def test_rows_keep_their_routes_on_the_way_to_other_ranks() -> None:
    batch = StepBatch.of(rollouts(), mask_truncated=False, with_routes=True)
    for row, expected in zip(decode(encode(batch)).rows, batch.rows, strict=True):
        assert row.routes is not None
        assert expected.routes is not None
        assert row.routes.dtype == np.uint8
        assert np.array_equal(row.routes, expected.routes)
        assert len(row.routes) == len(row) - 1
    without = StepBatch.of(rollouts(), mask_truncated=False)
    assert all(row.routes is None for row in decode(encode(without)).rows)


def test_ranks_exchange_the_experts_that_each_has_seen() -> None:
    batch = StepBatch.of(rollouts(), mask_truncated=False)
    alone = Scorer(policy := a_policy(), FakeRank(policy), temperature=1.0, token_budget=40)
    _, _, expected = alone.score_with(batch, routes=True)

    copies = [a_policy(), a_policy()]

    def score(distributed: FakeRank) -> dict[int, np.ndarray]:
        scorer = Scorer(copies[distributed.rank], distributed, temperature=1.0, token_budget=40)
        _, _, routed = scorer.score_with(dealt(batch, distributed), routes=True)
        share = scorer.share(routed, range(len(batch.rows)), token_budget=60)  # another one than that of the pass
        rows = range(len(batch.rows)) if distributed.is_main else [row for pack in share.packs for row in pack]
        return {row: routed.rows[row].routes for row in rows}

    all_routes, own_routes = on_ranks(2, score)
    assert len(all_routes) == len(expected.rows) > len(own_routes) > 0
    for routes in (all_routes, own_routes):
        for index, found in routes.items():
            assert np.array_equal(found, expected.rows[index].routes)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", ["auto", "never"])
def test_recorded_experts_are_those_of_each_row_alone(share: str) -> None:
    policy = a_policy()
    batch = StepBatch.of(rollouts(), mask_truncated=False)
    scorer = Scorer(policy, FakeRank(policy), temperature=1.0, token_budget=4096, share_prefixes=share)
    _, _, routed = scorer.score_with(batch, routes=True)
    for row in routed.rows:
        with torch.no_grad():
            *_, chosen = policy(collate([replace(row, routes=None)], [0]), with_routes=True)
        assert np.array_equal(row.routes, chosen.numpy())  # type: ignore[arg-type]


def test_the_reference_under_adapters_routes_by_itself() -> None:
    torch.manual_seed(0)
    policy = Policy(add_adapters(AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"]()), LoraConfig(rank=4)))
    batches = [StepBatch.of(rollouts(), mask_truncated=False, with_routes=routed) for routed in (True, False)]
    settings = {"temperature": 1.0, "token_budget": 4096}
    reference = Reference(Scorer(policy, FakeRank(policy), with_routes=False, **settings), policy.model.disable_adapter)
    assert torch.equal(reference.score(batches[0]), reference.score(batches[1]))
    scorer = Scorer(policy, FakeRank(policy), **settings)
    assert not torch.equal(scorer.score(batches[0]), scorer.score(batches[1]))
