"""Checkpoints resume with another ZeRO stage or number of ranks, with bit-equal parameters and moments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from lockstep.rollout.errors import CheckpointError
from lockstep.trainer.checkpoint import checkpoint
from lockstep.trainer.config.groups.optimizer_settings import OptimizerConfig
from lockstep.trainer.distributed.unsharded_state import WholeParameter, open_state
from lockstep.trainer.update.optimizers.optimizer import make_optimizer
from tests.fixtures.ranks import accelerate, run_ranks
from tests.integration.test_run import demo, metrics, train  # noqa: F401  # `demo` is a fixture
from tests.integration.workers.reshard import layers

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "reshard.py"
ONE = ("", 1)
TWO = ("zero3", 2)


def trained_names() -> list[str]:
    module = layers()
    optimizer = make_optimizer(module, OptimizerConfig(weight_decay=0.1))
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def saved(path: Path) -> Mapping[str, WholeParameter]:
    stage = json.loads((path / checkpoint.MANIFEST).read_text())["zero_stage"]
    read = open_state(path, trained=trained_names(), zero_stage=stage)
    return {name: read(name) for name in trained_names()}


def go_on(
    directory: Path, ranks: tuple[str, int], optimizer: str, source: Path | None = None, *settings: object
) -> Path:
    """Run the worker on these ranks and return its checkpoints."""
    launcher, count = ranks
    given = (optimizer, directory, *([] if source is None else [source, *settings]))
    done = run_ranks(accelerate(launcher, count) if launcher else (), WORKER, *given, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return directory / "checkpoints"


def check_same(path: Path, expected: Path, *, tolerance: float = 0.0) -> None:
    found, first = saved(path), saved(expected)
    for name, parameter in first.items():
        torch.testing.assert_close(found[name].weight, parameter.weight, rtol=tolerance, atol=tolerance)
        assert parameter.moments, "an optimizer without moments shows nothing"
        assert found[name].moments.keys() == parameter.moments.keys()
        for key, value in parameter.moments.items():
            torch.testing.assert_close(found[name].moments[key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("way", "optimizer"),
    [
        ((TWO, ONE), "adamw"),
        ((TWO, ("zero3", 3), ("zero2", 2), ("zero2", 3), TWO, ONE), "adamw_tf"),
        ((("zero2", 2), TWO, ONE), "sgd"),
    ],
)
def test_parameters_and_moments_are_the_same_bits_on_other_ranks(
    way: tuple[tuple[str, int], ...], optimizer: str, tmp_path: Path
) -> None:
    first = go_on(tmp_path / "begin", ONE, optimizer)
    source = first / "step-3"
    for number, ranks in enumerate(way):
        checkpoints = go_on(tmp_path / str(number), ranks, optimizer, source)
        source = checkpoints / "step-3"
        check_same(source, first / "step-3")
        check_same(checkpoints / "step-5", first / "step-5", tolerance=1e-5)  # sums in another order


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_changed_weight_decay_counts_under_zero3(tmp_path: Path) -> None:
    """DeepSpeed's state has a copy of the optimizer's settings, like torch's."""
    first = go_on(tmp_path / "begin", TWO, "adamw")
    go_on(tmp_path / "changed", TWO, "adamw", first / "step-3", 0.5)
    assert json.loads((tmp_path / "begin/decays.json").read_text()) == [0.0, 0.1]
    assert json.loads((tmp_path / "changed/decays.json").read_text()) == [0.0, 0.5]


@pytest.mark.distributed
def test_a_checkpoint_that_cannot_be_resharded_is_named(tmp_path: Path) -> None:
    path = go_on(tmp_path, ONE, "adamw") / "step-3"
    with pytest.raises(CheckpointError, match=r"of another model.*optimizer has 5 parameters, this one has 1"):
        open_state(path, trained=["0.weight"], zero_stage=0)
    with pytest.raises(CheckpointError, match=r"another model: 1 parameters differ, first another\.weight"):
        open_state(path, trained=["another.weight", *trained_names()[1:]], zero_stage=0)
    with pytest.raises(CheckpointError, match="lacks optim states of DeepSpeed"):
        open_state(path, trained=trained_names(), zero_stage=3)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_two_ranks_and_comes_back(demo: tuple[str, ...], tmp_path: Path) -> None:  # noqa: F811
    """Two updates in one process, two on two ranks of ZeRO-3, then one process again."""
    settings = (
        *demo, f"run_root={tmp_path}", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        "checkpoint.every=1", "checkpoint.keep=99", "logger.print_rollouts=0",
        "optimizer.schedule=constant",  # the others end with the run, and these runs end at different updates
    )  # fmt: skip
    train(*settings, "run_name=whole", "updates=6")
    train(*settings, "run_name=moved", "updates=2")
    said = train(*settings, "run_name=moved", "updates=4", "resume=auto", ranks=2)
    assert "was saved by other ranks" in " ".join(said.split())
    fork = f"resume={tmp_path}/moved/checkpoints/step-4"
    said = train(*settings, "run_name=back", "updates=6", fork)
    assert "was saved by other ranks" in " ".join(said.split())
    whole = {line["step"]: line for line in metrics(tmp_path / "whole")}
    moved = {line["step"]: line for run in ("moved", "back") for line in metrics(tmp_path / run)}
    assert sorted(moved) == list(range(1, 7))
    # Weights, moments and data of the third update equal those of the run in one process, so its tokens do too.
    assert moved[3]["reward/mean"] == whole[3]["reward/mean"]
    assert moved[3]["optim/grad_norm"] == pytest.approx(whole[3]["optim/grad_norm"], rel=1e-5)
    for line in moved.values():
        assert line["rollout/token_match_rate"] == 1.0
        assert line["sync/canary_abs_diff"] < 1e-3
        assert line["sync/version"] == line["step"]
