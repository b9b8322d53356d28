"""examples/one_step.py makes the step of `Trainer.step`, with numbers that are equal to the bit.

Both compute in this process, with the same kernels on the same packs: nothing is rounded in another way.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from examples import one_step as example
from lockstep.demo.make import make_demo
from lockstep.demo.manifest import DemoInfo
from lockstep.rollout.engine.embedded import EmbeddedEngine
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.build import load_policy
from lockstep.trainer.collect.groups import Collected
from lockstep.trainer.config.schema import Config
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.model.decoder import decoder_setup
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.observe.step_metrics import StepReport
from lockstep.trainer.run.assembly import make_sync
from lockstep.trainer.step import Trainer
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from lockstep.trainer.update.updater import Updater
from tests.fixtures.composed import demo
from tests.fixtures.forked_python import forks_for_spawns
from tests.fixtures.paths import ROOT

pytestmark = pytest.mark.timeout(900)  # the first test makes the demo's model, if no other has
SOURCE = ROOT / "examples" / "one_step.py"
MAX_LINES = 300

Checksums = dict[str, str]
"""SHA-256 of every parameter, as an engine holds it."""


@pytest.fixture(scope="module")
def made() -> DemoInfo:
    """The demo of `scripts/make_demo_model.py`, made if missing."""
    model_dir, data_dir = ROOT / "models" / "calculator", ROOT / "data" / "demo" / "calculator"
    return make_demo("calculator", model_dir, data_dir, 0, Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def engine(made: DemoInfo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEngine]:
    with BackgroundLoop() as loop, forks_for_spawns():
        engine = example.start_engine(made.model_dir, loop, tmp_path_factory.mktemp("engine") / "engine.log")
        yield engine
        loop.run(engine.close())


def checksums(engine: EmbeddedEngine) -> Checksums:
    return engine.loop.run(engine.weight_checksums())


@pytest.fixture(scope="module")
def by_hand(made: DemoInfo, engine: EmbeddedEngine) -> example.OneStep:
    return example.one_step(engine, made.model_dir, example.read_questions(made.data_dir / "train.jsonl"))


@pytest.fixture(scope="module")
def sent(by_hand: example.OneStep, engine: EmbeddedEngine) -> Checksums:
    """Weights of the engine after the example."""
    return checksums(engine)


@pytest.fixture(scope="module")
def config(made: DemoInfo) -> Config:
    """The demo, with the size of the example's batch and packs."""
    return demo(
        f"model.path={made.model_dir}",
        f"optimizer.lr={example.LR}",
        f"rollout.prompts_per_step={example.NUM_PROMPTS}",
        f"rollout.samples_per_prompt={example.GROUP_SIZE}",
        f"token_budget={example.TOKEN_BUDGET}",
        "share_prefixes=never",
    )


class Sampled:
    """A source that returns the rollouts of the example."""

    def __init__(self, by_hand: example.OneStep) -> None:
        self._rollouts = tuple(by_hand.rollouts)

    def collect(self, *arguments: Any) -> Collected:
        return Collected(rollouts=self._rollouts, trained=self._rollouts)


@pytest.fixture(scope="module")
def by_library(
    by_hand: example.OneStep, sent: Checksums, engine: EmbeddedEngine, config: Config
) -> tuple[StepReport, Policy, Checksums]:
    """`Trainer.step` on the rollouts of the example: its report, its weights, and those of the engine."""
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    policy = load_policy(config.model, decoder_setup(config.model, config.rotary_context))
    updater = Updater(distributed.prepare(policy, make_optimizer(policy, config.optimizer)), distributed, config)
    sync = make_sync(config, distributed, updater, engines=[engine])
    sync.push(0)
    assert checksums(engine) != sent, "the engine is back at the initial weights"
    trainer = Trainer(
        config,
        distributed=distributed,
        updater=updater,
        rollouts=Sampled(by_hand),  # type: ignore[arg-type]  # only what a step calls
        reference=None,
        sync=sync,
    )
    report = trainer.step()
    sync.close()
    return report, policy, checksums(engine)


@pytest.mark.engine
def test_the_step_by_hand_has_something_to_learn(by_hand: example.OneStep) -> None:
    """Without turns, spread and packs, the comparisons below would hold for many wrong steps."""
    turns = {rollout.num_turns for rollout in by_hand.rollouts}
    assert len(by_hand.rollouts) == example.NUM_PROMPTS * example.GROUP_SIZE
    assert turns > {1}, "episodes with and without the tool"
    assert {0.0, 1.0} == set(by_hand.batch.rewards_S.tolist())
    assert by_hand.advantages_N.min() < 0 < by_hand.advantages_N.max()
    assert len(example.pack_rows(by_hand.batch)) > 1
    assert (by_hand.weights_N != 1).any(), "engine and trainer round differently"


@pytest.mark.engine
def test_the_step_by_hand_is_that_of_the_trainer(
    by_hand: example.OneStep, by_library: tuple[StepReport, Policy, Checksums], sent: Checksums
) -> None:
    report, policy, checksums = by_library
    assert report.update == by_hand.synced.version == 1
    for name, (found, expected) in {
        "advantages": (by_hand.advantages_N, report.advantages_N),
        "logprobs": (by_hand.old_N, report.logp_train_N),
        "correction weights": (by_hand.weights_N, report.weights_N),
    }.items():
        assert torch.equal(found, expected), name
    loss_and_norm = (by_hand.loss, by_hand.grad_norm)
    assert loss_and_norm == (report.metrics["policy/loss"], report.metrics["optim/grad_norm"])
    expected = dict(policy.named_parameters())
    found = dict(by_hand.policy.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert sent == checksums, "the engine has the same weights from both"


@pytest.mark.engine
def test_the_engine_samples_with_the_trained_weights(made: DemoInfo, by_hand: example.OneStep) -> None:
    before = dict(Policy.from_pretrained(made.model_dir).named_parameters())
    moved = [name for name, weight in by_hand.policy.named_parameters() if not torch.equal(weight, before[name])]
    assert moved == list(before), "every parameter was trained"
    assert set(by_hand.again.versions_N.tolist()) == {1}
    assert by_hand.trained_gap < 1e-5 < 1e-3 < by_hand.initial_gap
    assert by_hand.synced.canary_abs_diff < 1e-4


@pytest.mark.engine
def test_the_report_prints_the_step(by_hand: example.OneStep, capsys: pytest.CaptureFixture[str]) -> None:
    example.report(by_hand)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"episodes  {len(by_hand.rollouts)} with ")
    assert f"loss {by_hand.loss:.6f}, gradient norm {by_hand.grad_norm:.4f}" in lines[4]


def test_the_values_on_the_page_are_those_of_the_demo() -> None:
    """Also of those that this step does not reach, such as the bounds of the clip."""
    config = demo()
    algorithm, rollout, optimizer, correction = config.algorithm, config.rollout, config.optimizer, config.correction
    clip = POLICY_LOSSES[algorithm.loss].values(algorithm)
    named = SimpleNamespace(
        MAX_TURNS=config.max_turns,
        MAX_TOKENS_PER_TURN=rollout.max_tokens_per_turn,
        CONTEXT=rollout.max_model_len,
        TEMPERATURE=rollout.temperature,
        CLIP_LOW=clip["clip_low"],
        CLIP_HIGH=clip["clip_high"],
        MAX_WEIGHT=correction.high,
        LR=optimizer.peak_lr,
        BETAS=tuple(optimizer.betas),
        MAX_GRAD_NORM=optimizer.max_grad_norm,
        SEED=config.seed,
    )
    assert vars(named).items() <= vars(example).items()
    chosen = (algorithm.advantage, algorithm.loss, algorithm.normalizer, correction.mode, *config.reward.functions)
    text = SOURCE.read_text()
    assert [name for name in chosen if f'"{name}"' not in text] == []


def test_the_example_is_a_page_without_settings() -> None:
    text = SOURCE.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    modules = {
        name
        for node in ast.walk(ast.parse(text))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert any(name.startswith("lockstep.trainer.") for name in modules)
    assert [name for name in modules if name.startswith(("lockstep.trainer.config", "lockstep.trainer.build"))] == []
