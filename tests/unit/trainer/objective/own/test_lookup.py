"""Losses and advantages of a user's file: declarations, settings, outputs, and errors of one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.rollout.errors import ConfigError, TrainingError
from lockstep.trainer.objective.advantages import ADVANTAGES
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages, TurnInputs
from lockstep.trainer.objective.declare import declared_arguments
from lockstep.trainer.objective.losses import POLICY_LOSSES
from lockstep.trainer.objective.losses.inputs import LossInputs, StepInputs
from lockstep.trainer.objective.own.lookup import advantage_named, is_advantage, policy_loss_named

HEAD = """
from typing import Annotated
import torch
from lockstep.trainer.objective.advantages.inputs import AdvantageInputs, Advantages
from lockstep.trainer.objective.declare import advantage, policy_loss
from lockstep.trainer.objective.losses.inputs import LossInputs, LossOutputs, plain_log_ratio
from lockstep.trainer.setting import Setting
"""


def write(tmp_path: Path, code: str, head: str = HEAD) -> str:
    (tmp_path / "own.py").write_text(head + code)
    return f"{tmp_path}/own.py:fn"


def inputs() -> LossInputs:
    logp_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    zeros_T = torch.zeros(2)
    return LossInputs(
        logp_T=logp_T,
        old_logp_T=zeros_T - 1,
        advantages_T=zeros_T + 1,
        rollout_T=torch.tensor([0, 1]),
        num_rollouts=2,
    )


def given(**settings: object) -> SimpleNamespace:
    """The part of `Config.algorithm` that a user's loss or advantage reads."""
    return SimpleNamespace(loss_settings=settings, advantage_settings=settings)


def test_built_in_names_stay_as_they_are() -> None:
    assert policy_loss_named("gspo") is POLICY_LOSSES["gspo"]
    assert advantage_named("gae") is ADVANTAGES["gae"]


def test_a_plain_function_is_a_loss_with_typed_settings(tmp_path: Path) -> None:
    loss = policy_loss_named(
        write(tmp_path, "def fn(inputs: LossInputs, *, a: float = 2.0, b: int | None = None, c='x'):\n"
              "    return -inputs.logp_T * a")
    )  # fmt: skip
    assert {name: argument.type for name, argument in loss.arguments.items()} == {"a": float, "b": int | None, "c": str}
    assert loss.has_ratio
    assert loss.whole_step(given()) is None
    assert loss.configured(given())(inputs()).loss_T.tolist() == [2.0, 4.0]
    assert loss.configured(given(a=3))(inputs()).loss_T.tolist() == [3.0, 6.0]


def test_a_loss_alone_gets_the_metrics_of_every_loss(tmp_path: Path) -> None:
    outputs = policy_loss_named(write(tmp_path, "def fn(inputs):\n    return -inputs.logp_T"))(inputs())
    assert set(outputs.metrics) == {"policy/ratio_mean", "policy/approx_kl"}


def test_the_decorator_gives_needs_and_registers_nothing(tmp_path: Path) -> None:
    spec = write(
        tmp_path,
        "@policy_loss(has_ratio=False, sequence_log_ratio=plain_log_ratio)\n"
        "def fn(inputs, *, own_setting: Annotated[float, Setting(default=1.0, description='own', above=0)]):\n"
        "    return -inputs.logp_T * own_setting",
    )
    before = set(POLICY_LOSSES), set(declared_arguments())
    loss = policy_loss_named(spec)
    assert not loss.has_ratio
    assert loss.arguments["own_setting"].setting.above == 0
    values = loss.whole_step(given(own_setting=2.0))
    assert values is not None
    zeros, rollout_N = torch.zeros(2), torch.tensor([0, 0])
    of_step = StepInputs(
        logp_N=torch.tensor([1.0, 2.0]), old_logp_N=zeros, sampling_logp_N=zeros, advantages_N=zeros,
        rollout_N=rollout_N, num_rollouts=1, seed=0,
    )  # fmt: skip
    assert values(of_step)["seq_log_ratio"].tolist() == [1.5, 1.5]
    assert (set(POLICY_LOSSES), set(declared_arguments())) == before


def test_annotations_may_be_texts(tmp_path: Path) -> None:
    code = "def fn(inputs: Missing, *, a: float | None = 1.0, b: list[int] = [1]):\n    return -inputs.logp_T"
    loss = policy_loss_named(write(tmp_path, code, head="from __future__ import annotations\n"))
    assert {name: argument.type for name, argument in loss.arguments.items()} == {"a": float | None, "b": list[int]}


def test_an_advantage_of_a_file_gets_common_metrics(tmp_path: Path) -> None:
    advantage = advantage_named(write(tmp_path, "def fn(inputs: AdvantageInputs):\n    return inputs.rewards_S - 0.5"))
    rewards = AdvantageInputs(rewards_S=torch.tensor([1.0, 0.0, 1.0]), group_S=torch.tensor([0, 0, 1]))
    found = advantage(rewards)
    assert found.advantages_S.tolist() == [0.5, -0.5, 0.5]
    assert found.metrics == {"reward/zero_std_fraction": 0.5}
    assert not advantage.compares_group


def test_the_kind_is_that_of_the_decorator_or_the_inputs(tmp_path: Path) -> None:
    write(
        tmp_path,
        "def loss(inputs: LossInputs): ...\ndef estimate(inputs: AdvantageInputs): ...\n"
        "@advantage()\ndef decorated(inputs): ...\n",
    )
    kinds = {name: is_advantage(f"{tmp_path}/own.py:{name}") for name in ("loss", "estimate", "decorated")}
    assert kinds == {"loss": False, "estimate": True, "decorated": True}
    assert (is_advantage("grpo"), is_advantage("gspo")) == (True, False)
    with pytest.raises(ConfigError, match="grpoo is not one of"):
        is_advantage("grpoo")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def other(): ...", "has no function 'fn'"),
        ("x = 1\ny = 1 / 0", "cannot be loaded: ZeroDivisionError in line 9: division by zero"),
        ("def fn(inputs) return 1", "cannot be loaded: SyntaxError in line 8"),
        ("def fn(): ...", r"takes 1 positional argument\(s\), found none"),
        ("def fn(inputs, sharpness=2.0): ...", r"found inputs, sharpness; write a `\*` before its settings"),
        ("def fn(inputs, *, sharpness): ...", "argument sharpness has no default; write for example"),
        ("def fn(inputs, *, a: dict = {}): ...", "has the type <class 'dict'>, which no setting can have"),
        ("def fn(inputs, *, a: int = 1.5): ...", "default of its argument a is 1.5, expected an integer"),
        ("def fn(inputs, *, a: 'Missing' = 1): ...", "annotation Missing cannot be read"),
        ("@policy_loss(ratio=True)\ndef fn(inputs): ...", "unexpected keyword argument 'ratio'"),
        ("@policy_loss\ndef fn(inputs): ...", "TypeError in line 8"),
        ("@advantage()\ndef fn(inputs): ...", "decorated as the other kind; set algorithm.advantage="),
    ],
)
def test_a_function_that_cannot_be_a_loss_is_refused_in_one_sentence(tmp_path: Path, code: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        policy_loss_named(write(tmp_path, code))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("inputs.logp_T.sum()", r"returned the shape \(\), expected \(2,\): one loss per token"),
        ("inputs.logp_T[:1]", r"returned the shape \(1,\)"),
        ("(inputs.logp_T > 0)", "returned a tensor of bool"),
        ("None", "returned an object of the type NoneType"),
        ("inputs.logp", "AttributeError in line 10: 'LossInputs' object has no attribute 'logp'"),
        (
            "LossOutputs(loss_T=inputs.logp_T, metrics={'a': 1.0})",
            "returned the metric 'a' as an object of the type float",
        ),
        ("LossOutputs(loss_T=inputs.logp_T, metrics={'a': inputs.logp_T.detach()})", "without dimensions"),
    ],
)
def test_a_wrong_output_never_reaches_the_loss(tmp_path: Path, body: str, sentence: str) -> None:
    with pytest.raises(TrainingError, match=sentence):
        policy_loss_named(write(tmp_path, f"\ndef fn(inputs):\n    return {body}"))(inputs())


def test_memory_that_runs_out_stays_a_memory_error(tmp_path: Path) -> None:
    code = "def fn(inputs):\n    raise torch.OutOfMemoryError('no room')"
    with pytest.raises(torch.OutOfMemoryError):
        policy_loss_named(write(tmp_path, code))(inputs())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("inputs.rewards_S / 0", "returned the advantage inf at index 0"),
        ("inputs.rewards_S[:1]", "one advantage per rollout"),
    ],
)
def test_a_wrong_advantage_never_reaches_the_loss(tmp_path: Path, body: str, sentence: str) -> None:
    spec = write(tmp_path, f"def fn(inputs: AdvantageInputs) -> Advantages:\n    return {body}")
    with pytest.raises(TrainingError, match=sentence):
        advantage_named(spec)(AdvantageInputs(rewards_S=torch.ones(2), group_S=torch.zeros(2).long()))


def test_the_file_is_run_once(tmp_path: Path) -> None:
    spec = write(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\ndef fn(inputs): ...", head="")
    assert policy_loss_named(spec).arguments == policy_loss_named(spec).arguments == {}
    assert (tmp_path / "ran").read_text() == "x"


def test_outputs_may_be_the_records_of_built_in_functions(tmp_path: Path) -> None:
    spec = write(tmp_path, "def fn(inputs):\n    return Advantages(inputs.rewards_S, {'own/x': 1.0})")
    found = advantage_named(spec)(AdvantageInputs(rewards_S=torch.ones(2), group_S=torch.zeros(2).long()))
    assert isinstance(found, Advantages)
    assert found.metrics == {"reward/zero_std_fraction": 1.0, "own/x": 1.0}


def test_an_advantage_of_turns_has_one_entry_per_turn(tmp_path: Path) -> None:
    code = "@advantage(needs_states=True)\ndef fn(inputs):\n    return inputs.turns.returns_K"
    estimate = advantage_named(write(tmp_path, code))
    turns = TurnInputs(
        returns_K=torch.tensor([1.0, 2.0, 3.0]), rollout_K=torch.tensor([0, 0, 1]), state_K=torch.tensor([0, 1, 0])
    )
    found = estimate(AdvantageInputs(rewards_S=torch.zeros(2), group_S=torch.zeros(2, dtype=torch.int64), turns=turns))
    assert found.advantages_S.tolist() == [1.0, 2.0, 3.0]
