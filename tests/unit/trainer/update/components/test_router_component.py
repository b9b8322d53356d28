"""Router losses in whole updates: against transformers' function, and the same however the work is divided."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import TrainingError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout
from lockstep.trainer.batch.batch_bytes import ROW_ARRAYS
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.config.groups.algorithm_settings import AlgorithmConfig
from lockstep.trainer.config.groups.correction_settings import CorrectionConfig
from lockstep.trainer.config.groups.model_settings import LoraConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.credit.correction import StepCorrection
from lockstep.trainer.credit.old_policy import Recomputed
from lockstep.trainer.credit.targets import Targets
from lockstep.trainer.model.critic import ActorCritic, Critic
from lockstep.trainer.model.layers import router_outputs
from lockstep.trainer.model.lora import add_adapters
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.score.scorer import Scorer
from lockstep.trainer.update.updater import Updater
from tests.fixtures.distributed import FakeRank, flat_gradient, on_ranks
from tests.fixtures.families import FAMILIES
from tests.integration.workers.gradients import fixed_rollouts

AUX, Z = 0.7, 0.03
LOSSES = {"router_aux_coef": AUX, "router_z_coef": Z}


def moe_policy(family: str = "qwen3_moe", **setup: bool) -> Policy:
    torch.manual_seed(0)
    return Policy(AutoModelForCausalLM.from_config(FAMILIES[family]()), **setup)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return moe_policy()


@pytest.fixture
def batch() -> StepBatch:
    return StepBatch.of(fixed_rollouts(), mask_truncated=False)


def config(token_budget: int = 100_000, share_prefixes: str = "never", **algorithm: Any) -> Config:
    made = Config(algorithm=AlgorithmConfig(**{"loss": "reinforce"} | algorithm), token_budget=token_budget)
    made.share_prefixes = share_prefixes
    return made


def targets_of(batch: StepBatch, advantage: float = 1.0, **correction: Any) -> Targets:
    """Return targets with advantages of both signs, and old logprobs far from the engine's."""
    num_tokens = batch.layout.num_tokens
    generator = torch.Generator().manual_seed(1)
    old = Recomputed(batch.sampling_logprobs_N + 0.3 * torch.randn(num_tokens, generator=generator))
    corrected = StepCorrection.of(batch, old, CorrectionConfig(**{"mode": "off"} | correction))
    return Targets(advantages_N=advantage * torch.randn(num_tokens, generator=generator), old=old, correction=corrected)


def updated(
    policy: Policy, batch: StepBatch, made: Config, targets: Targets, rank: FakeRank | None = None
) -> tuple[Tensor, dict[str, float]]:
    rank = rank or FakeRank()
    rank.prepare(policy, torch.optim.SGD(policy.parameters()))
    metrics = Updater(policy, rank, made).update(batch, targets).metrics
    return rank.gradient, dict(metrics)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "gpt_oss"])
def test_on_one_row_the_update_adds_the_loss_of_transformers(family: str) -> None:
    policy = moe_policy(family)
    call = EngineCall(
        prompt_ids=tuple(range(20, 30)),
        sampled_ids=tuple(range(100, 140)),
        sampled_logprobs=(-6.0,) * 40,
        finish_reason=FinishReason.STOP,
    )
    batch = StepBatch.of([Rollout(rollout_id=0, group_id=0, calls=(call,), reward=1.0)], mask_truncated=False)
    targets = targets_of(batch, advantage=0.0)
    found, metrics = updated(policy, batch, config(router_aux_coef=AUX), targets)

    (row,) = rows_from_calls([call], rollout_id=0)
    predicts = torch.from_numpy(row.loss_mask).roll(-1)[None].float()  # position p - 1 predicts the token at p
    decoder = policy.causal_lm.get_decoder()
    logits = decoder(torch.from_numpy(row.ids)[None], use_cache=False, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(tuple(one.flatten(0, -2) for one in logits), 4, 2, predicts)
    (AUX * expected + 0.0 * sum(parameter.sum() for parameter in policy.parameters())).backward()
    assert metrics["router/aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["policy/loss"] == pytest.approx(AUX * expected.item(), rel=1e-5)
    assert relative_error(found, flat_gradient(policy)) < 1e-5
    assert float(found.norm()) > 1e-3


PARTITIONS = {
    "many microbatches": {"token_budget": 96},
    "shared prefixes": {"share_prefixes": "always"},
    "shared prefixes in many microbatches": {"share_prefixes": "always", "token_budget": 96},
}
NAMES = ("router/aux_loss", "router/z_loss", "router/load_max", "router/load_cv", "router/unused_experts")


@pytest.fixture(scope="module")
def whole(policy: Policy) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of one process with one microbatch."""
    batch = StepBatch.of(fixed_rollouts(), mask_truncated=False)
    found = updated(policy, batch, config(**LOSSES), targets_of(batch))
    plain, _ = updated(policy, batch, config(), targets_of(batch))
    assert found[1]["perf/microbatches"] == 1
    assert relative_error(plain, found[0]) > 0.1, "the router losses hardly change the gradient"
    return found


@pytest.mark.parametrize("partition", PARTITIONS)
def test_microbatches_and_shared_prefixes_do_not_change_the_gradient(
    partition: str, policy: Policy, batch: StepBatch, whole: tuple[Tensor, dict[str, float]]
) -> None:
    gradient, metrics = updated(policy, batch, config(**PARTITIONS[partition], **LOSSES), targets_of(batch))
    assert metrics["perf/microbatches"] > 1 or metrics["perf/shared_tokens_frac"] > 0.05
    assert relative_error(gradient, whole[0]) < 1e-5
    assert {name: metrics[name] for name in NAMES} == pytest.approx({name: whole[1][name] for name in NAMES}, rel=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_do_not_change_the_gradient(
    num_ranks: int, policy: Policy, batch: StepBatch, whole: tuple[Tensor, dict[str, float]]
) -> None:
    made, targets = config(token_budget=96, **LOSSES), targets_of(batch)
    copies = [deepcopy(policy) for _ in range(num_ranks)]
    results = on_ranks(num_ranks, lambda rank: updated(copies[rank.rank], batch, made, targets, rank))
    gradient = torch.stack([gradient for gradient, _ in results]).mean(0)
    assert relative_error(gradient, whole[0]) < 1e-5
    for _, metrics in results:
        assert {name: metrics[name] for name in NAMES} == pytest.approx(
            {name: whole[1][name] for name in NAMES}, rel=1e-5
        )


def test_gradient_checkpointing_does_not_change_the_gradient(
    batch: StepBatch, whole: tuple[Tensor, dict[str, float]]
) -> None:
    gradient, metrics = updated(moe_policy(gradient_checkpointing=True), batch, config(**LOSSES), targets_of(batch))
    assert relative_error(gradient, whole[0]) < 1e-5
    assert metrics["router/load_cv"] == pytest.approx(whole[1]["router/load_cv"])


def test_with_adapters_the_gradient_of_the_router_losses_is_theirs(batch: StepBatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"]())
    policy = Policy(add_adapters(model, LoraConfig(rank=4, alpha=8)))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    targets = targets_of(batch, advantage=0.0)
    expected, _ = updated(policy, batch, config(**LOSSES), targets)
    found, metrics = updated(policy, batch, config(token_budget=96, **LOSSES), targets)
    assert metrics["router/aux_loss"] > 0
    assert float(expected.norm()) > 1e-4
    assert relative_error(found, expected) < 1e-5


@pytest.mark.slow
def test_compiled_layers_give_router_losses_the_same_gradient(
    batch: StepBatch, whole: tuple[Tensor, dict[str, float]]
) -> None:
    compiled = moe_policy(is_compiled=True, gradient_checkpointing=True)
    gradient, metrics = updated(compiled, batch, config(**LOSSES), targets_of(batch))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert relative_error(gradient, whole[0]) < 1e-5
    assert {name: metrics[name] for name in NAMES} == pytest.approx({name: whole[1][name] for name in NAMES}, rel=1e-5)


def test_the_routers_of_a_critic_have_no_losses(policy: Policy, batch: StepBatch) -> None:
    critic = Critic(AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"]()).get_decoder())
    updater = Updater(ActorCritic(policy, critic), FakeRank(policy), config(**LOSSES))
    packed = updater.scorer.packed(batch, [0, 1])
    with updater._routers.recorded() as records:
        updater.scorer.forward(packed, with_values=True)
    assert len(records) == 2, "one per layer of the policy"


def test_a_router_that_is_bypassed_ends_the_update(batch: StepBatch) -> None:
    """As a fused kernel would bypass it, which reads the router's weight without calling the module."""
    policy = moe_policy()
    updater = Updater(policy, FakeRank(policy), config(router_z_coef=Z))
    router, _ = router_outputs.routers(policy.causal_lm.get_decoder())[1]
    router._forward_hooks.clear()
    with pytest.raises(TrainingError, match=r"1 of 2 routers ran.*set algorithm\.router_aux_coef=0"):
        updater.update(batch, targets_of(batch))


def test_a_history_that_two_rows_repeat_counts_once(policy: Policy) -> None:
    """Train the two turns of a conversation in one row, and as two branches."""
    rollout = next(one for one in fixed_rollouts() if len(one.calls) == 2)
    whole = StepBatch.of([rollout], mask_truncated=False)
    (row,) = whole.rows
    is_first = row.turns == 0
    end = int(np.flatnonzero(is_first)[-1]) + 1
    branches = (
        replace(row, **{name: getattr(row, name)[:end] for name in ROW_ARRAYS}),
        replace(row, loss_mask=row.loss_mask & ~is_first),
    )
    branched = replace(whole, rows=branches)
    assert branched.layout.num_tokens == whole.layout.num_tokens
    targets = targets_of(whole)
    expected, metrics = updated(policy, whole, config(**LOSSES), targets)
    found, branched_metrics = updated(policy, branched, config(**LOSSES), targets)
    assert relative_error(found, expected) < 1e-5
    assert {name: branched_metrics[name] for name in NAMES} == pytest.approx({name: metrics[name] for name in NAMES})


def test_rejected_tokens_leave_the_router_losses(policy: Policy, batch: StepBatch) -> None:
    """Reject tokens of a batch, and sample none of them in another one."""
    targets = targets_of(batch, advantage=0.0, rejection={"token_k2": 0.02})
    keep_N, starts = targets.keep_N.numpy(), batch.layout.token_start
    assert 0 < keep_N.sum() < len(keep_N)
    found, metrics = updated(policy, batch, config(**LOSSES), targets)
    rows = []
    for index, row in enumerate(batch.rows):
        mask = row.loss_mask.copy()
        mask[mask] = keep_N[starts[index] : starts[index + 1]]
        rows.append(replace(row, loss_mask=mask))
    kept = replace(batch, rows=tuple(rows))
    expected, kept_metrics = updated(policy, kept, config(**LOSSES), targets_of(kept, advantage=0.0))
    assert relative_error(found, expected) < 1e-5
    assert {name: metrics[name] for name in NAMES} == pytest.approx({name: kept_metrics[name] for name in NAMES})


def test_each_update_counts_its_own_tokens(policy: Policy, batch: StepBatch) -> None:
    """With minibatches, the first update has the fractions of its own rollouts, not those of the whole batch."""
    made = config(minibatches=3, **LOSSES)
    seen: list[float] = []
    for token_budget in (100_000, 96):
        made = replace(made, token_budget=token_budget)
        gradient, metrics = updated(policy, batch, made, targets_of(batch))
        seen += [float(gradient.norm()), metrics["router/aux_loss"]]
    assert seen[:2] == pytest.approx(seen[2:], rel=1e-5)
    _, one = updated(policy, batch, config(**LOSSES), targets_of(batch))
    assert seen[1] != pytest.approx(one["router/aux_loss"], rel=1e-6)


def test_without_router_losses_every_bit_of_the_update_is_that_of_an_update_without_hooks(
    batch: StepBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, metrics = updated(moe_policy(), batch, config(), targets_of(batch))
    assert metrics["router/load_max"] >= 1
    assert "router/aux_loss" not in metrics
    monkeypatch.setattr(router_outputs, "routers", lambda decoder: [])
    expected, plain = updated(moe_policy(), batch, config(), targets_of(batch))
    assert not [name for name in plain if name.startswith("router/")]
    assert torch.equal(found, expected)
    assert metrics["policy/loss"] == plain["policy/loss"]


def test_a_step_along_the_gradient_balances_the_load(batch: StepBatch) -> None:
    """Without advantages the gradient is that of the aux loss: steps along it must even out a lopsided router."""
    policy = moe_policy()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(0.1)[0] += 0.05 * torch.ones(parameter.shape[1])
    made, targets = config(router_aux_coef=1.0), targets_of(batch, advantage=0.0)
    _, before = updated(policy, batch, made, targets)
    for _ in range(20):
        gradient, after = updated(policy, batch, made, targets)
        pieces = gradient.float().split([parameter.numel() for parameter in policy.parameters()])
        with torch.no_grad():
            for parameter, piece in zip(policy.parameters(), pieces, strict=True):
                parameter -= 0.3 * piece.view_as(parameter)
    assert after["router/aux_loss"] < before["router/aux_loss"]
    assert after["router/load_cv"] < 0.8 * before["router/load_cv"]


FLIPPED = "router/flipped_frac"


def replaying(made: Config) -> Config:
    made.correction.routing_replay = "engine"
    return made


def own_routes(policy: Policy, batch: StepBatch) -> StepBatch:
    """Return the batch with the experts that the policy chooses."""
    return Scorer(policy, FakeRank(policy), temperature=1.0, token_budget=100_000).score_with(batch, routes=True)[2]


def flipping(batch: StepBatch) -> tuple[StepBatch, float]:
    """Change sets of experts in the last layer, and the order in all others; return the share of changed sets.

    In the last layer, so that no other router sees other states.
    """
    rng, rows, num_flipped = np.random.default_rng(3), [], 0
    for row in batch.rows:
        assert row.routes is not None
        routes = row.routes[:, :, ::-1].copy()
        is_flipped = rng.random(len(row)) < 0.3
        routes[is_flipped, -1] = (routes[is_flipped, -1] + 1) % 4
        num_flipped += int(is_flipped[np.flatnonzero(row.loss_mask) - 1].sum())
        rows.append(replace(row, routes=routes))
    num_layers = rows[0].routes.shape[1]
    return replace(batch, rows=tuple(rows)), num_flipped / (num_layers * batch.layout.num_tokens)


@pytest.mark.parametrize("partition", ["one microbatch", *PARTITIONS])
def test_flipped_routes_are_the_sets_that_the_routers_would_not_choose(
    partition: str, policy: Policy, batch: StepBatch
) -> None:
    routed = own_routes(policy, batch)
    made = replaying(config(**PARTITIONS.get(partition, {})))
    assert updated(policy, routed, made, targets_of(batch))[1][FLIPPED] == 0
    flipped, expected = flipping(routed)
    assert 0.1 < expected < 0.2
    assert updated(policy, flipped, made, targets_of(batch))[1][FLIPPED] == pytest.approx(expected)


def test_flipped_routes_are_counted_over_all_ranks_one_without_rows_too(policy: Policy, batch: StepBatch) -> None:
    for rows in (batch, StepBatch.of(fixed_rollouts()[:1], mask_truncated=False)):
        flipped, expected = flipping(own_routes(policy, rows))
        copies, made = [deepcopy(policy) for _ in range(3)], replaying(config(token_budget=96))
        for _, metrics in on_ranks(
            3, lambda rank, b=flipped, c=copies, m=made: updated(c[rank.rank], b, m, targets_of(b), rank)
        ):
            assert metrics[FLIPPED] == pytest.approx(expected)


def test_flipped_routes_are_counted_with_checkpointing_and_beside_router_losses(batch: StepBatch) -> None:
    policy = moe_policy(gradient_checkpointing=True)
    flipped, expected = flipping(own_routes(policy, batch))
    _, metrics = updated(policy, flipped, replaying(config(**LOSSES)), targets_of(batch))
    assert metrics[FLIPPED] == pytest.approx(expected)
    assert FLIPPED not in updated(policy, batch, config(), targets_of(batch))[1]


def test_rows_without_the_routes_that_shall_be_replayed_end_the_update(policy: Policy, batch: StepBatch) -> None:
    with pytest.raises(TrainingError, match="routes shall be replayed, and the rows of a pack have none"):
        updated(policy, batch, replaying(config()), targets_of(batch))
