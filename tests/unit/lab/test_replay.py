"""Replay: what is refused and why, the step that is read, and the verdict on its numbers.

A run that others wrote runs no code, reads no variable and names no address unasked. Whole replays with engines:
tests/integration/test_replay.py.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lockstep.lab.replay import Replay, replay, saved_step, settings_of
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import VersionSpan
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.observe.metrics_log import BATCH
from lockstep.trainer.sft.demonstration_rows import EPOCH
from tests.fixtures.distributed import FakeRank
from tests.unit.lab.pages.test_run_report import rollout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose config names code, addresses and variables, and trusts the code of its models."""
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'fired')!r}, 'w').write('x')\n"
        "class Env:\n    tools = ()\n    def __init__(self, **settings): pass\n"
        "    async def reset(self, example): pass\n    async def step(self, turn): pass\n"
        "def reward(rollout): return 1.0\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def write(run: Path, *changes: str) -> Path:
    config = OmegaConf.merge(
        OmegaConf.create(plain(Config())), {"model": {"path": str(run / "model")}}, OmegaConf.from_dotlist([*changes])
    )
    (run / "config.yaml").write_text(OmegaConf.to_yaml(config))
    return run


def test_code_of_models_is_trusted_only_if_the_command_line_says_so(run: Path):
    write(
        run, "model.trust_remote_code=true", "reward.functions=[model]",
        f"reward.settings={{model: {{path: {run / 'model'}, trust_remote_code: true}}}}",
    )  # fmt: skip
    for sample in (False, True):
        config = settings_of(run, [], sample=sample)
        assert config.model.trust_remote_code is False
        assert not any(settings.get("trust_remote_code") for settings in config.reward.settings.values())
        assert settings_of(run, [], sample=sample, trusts_run=True).model.trust_remote_code is False
        assert settings_of(run, ["model.trust_remote_code=true"], sample=sample).model.trust_remote_code is True
    given = settings_of(run, ["reward.settings.model.trust_remote_code=true"], sample=True)
    assert given.reward.settings["model"]["trust_remote_code"] is True


MCP = "environment={{name: mcp, settings: {{servers: {{a: %s}}}}}}"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("environment.name={run}/evil.py:Env", "evil.py:Env"),
        ("environment.settings={{env: '{run}/evil.py:Env'}}", "evil.py:Env"),
        ("reward.functions=['{run}/evil.py:reward']", "evil.py:reward"),
        ("reward.functions=[' {run}/evil.py:reward, x']", "evil.py:reward"),
        ("environment.name=verifiers", "verifiers"),
        (MCP % "{{command: sh, args: [-c, 'touch {run}/fired']}}", "touch"),
        (MCP % "{{command: cat, env: {{KEY: $HF_TOKEN}}}}", "$HF_TOKEN"),
        ("environment={{name: textarena, settings: {{python: '{run}/evil', env_id: a}}}}", "/evil"),
        ("environment={{name: mixed, settings: {{environments: {{mcp: {{servers: {{a: {{command: sh}}}}}}}}}}}}", "sh"),
        ("environment={{name: mixed, settings: {{environments: {{verifiers: {{env_id: a}}}}}}}}", "verifiers"),
        ("environment={{name: mixed, settings: {{environments: {{'{run}/evil.py:Env': {{}}}}}}}}", "evil.py:Env"),
        ("environment={{name: mixed, settings: {{environments: {{mixed: {{environments: {{mcp: {{}}}}}}}}}}}}", "mcp"),
        ("environment={{name: sandbox, settings: {{sandbox: remote, url: 'http://192.0.2.1'}}}}", "http://192.0.2.1"),
        ("environment={{name: sandbox, settings: {{sandbox: remote, token_env: HF_TOKEN}}}}", "HF_TOKEN"),
        ("environment={{name: sandbox, settings: {{sandbox: docker, docker_program: '{run}/evil'}}}}", "/evil"),
        ("environment={{name: sandbox, settings: {{unsafe: true}}}}", "unsafe"),
        ("reward.settings.llm_judge.url='http://192.0.2.1/v1'", "http://192.0.2.1/v1"),
        ("reward.settings.llm_judge.api_key_env=HF_TOKEN", "HF_TOKEN"),
        ("rollout.urls=['http://192.0.2.1']", "http://192.0.2.1"),
        ("rollout.api_key_env=WANDB_API_KEY", "WANDB_API_KEY"),
        ("environment.settings={{deep: [{{token_env: HF_TOKEN}}]}}", "HF_TOKEN"),
    ],
)
def test_samples_with_code_addresses_or_variables_of_the_run_must_be_asked_for(run: Path, change: str, named: str):
    write(run, change.format(run=run))
    with pytest.raises(ConfigError, match="--trust-run") as refused:
        settings_of(run, [], sample=True)
    assert named in str(refused.value)
    assert not (run / "fired").exists()


def test_a_replay_that_trains_imports_no_file(run: Path):
    write(run, f"environment.name={run}/evil.py:Env", f"reward.functions=['{run}/missing.py:reward']", "seed=3")
    config = settings_of(run, [], sample=False)
    assert config.seed == 3
    assert not (run / "fired").exists()
    assert not any("evil" in name for name in sys.modules)


def test_what_was_asked_for_is_used(run: Path):
    write(run, f"environment.name={run}/evil.py:Env")
    assert settings_of(run, [], sample=True, trusts_run=True).environment.name.endswith("evil.py:Env")
    assert (run / "fired").exists()


def test_what_the_command_line_names_needs_no_flag(run: Path):
    write(run, "rollout.urls=['http://192.0.2.1']")
    given = [f"reward.functions=[{run}/evil.py:reward]", "rollout.urls=[]"]
    assert settings_of(run, given, sample=True).reward.functions == [f"{run}/evil.py:reward"]


def test_interpolations_are_refused(run: Path):
    write(run)
    (run / "config.yaml").write_text("model: {path: '${oc.env:WANDB_API_KEY}'}\n")
    with pytest.raises(ConfigError, match="interpolation"):
        settings_of(run, [], sample=False)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["loss", "advantage"])
def test_a_loss_or_advantage_of_the_run_must_be_asked_for_also_to_train(run: Path, kind: str, sample: bool):
    write(run, f"algorithm.{kind}={run}/evil.py:reward")
    with pytest.raises(ConfigError, match=r"evil\.py:reward.*--trust-run"):
        settings_of(run, [], sample=sample)
    assert not (run / "fired").exists()
    assert settings_of(run, [f"algorithm.{kind}=" + {"loss": "gspo", "advantage": "rloo"}[kind]], sample=sample)
    assert not (run / "fired").exists()
    assert getattr(settings_of(run, [], sample=sample, trusts_run=True).algorithm, kind).endswith("evil.py:reward")
    assert (run / "fired").exists()


def test_demonstrations_at_an_address_must_be_asked_for(run: Path):
    write(run, "demonstrations.path='https://192.0.2.1/talks.jsonl'")
    with pytest.raises(ConfigError, match=r"https://192\.0\.2\.1/talks\.jsonl.*--trust-run"):
        settings_of(run, [], sample=False)
    assert settings_of(run, [], sample=False, trusts_run=True).demonstrations.path
    given = ["demonstrations.path=https://192.0.2.1/talks.jsonl"]
    assert settings_of(run, given, sample=False).demonstrations.path
    write(run, f"demonstrations.path={run}/talks.jsonl")
    assert settings_of(run, [], sample=False).demonstrations.path


def test_a_file_that_is_not_that_of_the_run_is_refused(run: Path):
    write(run, f"algorithm.loss={run}/evil.py:reward", f"algorithm.loss_sha256={'ab' * 32}")
    with pytest.raises(ConfigError, match=r"expected (ab){32}, .*set algorithm\.loss_sha256=null"):
        settings_of(run, [], sample=False, trusts_run=True)
    assert not (run / "fired").exists()
    assert settings_of(run, ["algorithm.loss_sha256=null"], sample=False, trusts_run=True)


def test_a_replay_keeps_the_weights_of_rewards_and_asks_no_teacher(run: Path):
    write(
        run, "reward.functions=[exact_match,numeric]", "reward.weights=[1.0,0.25]", "algorithm.teacher_coef=1.0",
        f"teacher.path={run / 'gone'}",
    )  # fmt: skip
    config = settings_of(run, [], sample=False)
    assert config.reward.weight_by_name == {"exact_match": 1.0, "numeric": 0.25}
    assert config.teacher.path == str(run / "model")


# The step that is read


def log(run: Path, *lines: tuple[int, int | None, float | None]) -> None:
    """Write metrics of (update, batch, epoch)."""
    texts = [json.dumps({"step": update, BATCH: batch, EPOCH: epoch}) for update, batch, epoch in lines]
    (run / "metrics.jsonl").write_text("\n".join(texts) + "\n")


def save(run: Path, update: int, *, version: int = 0) -> None:
    made = rollout(0, 1.0)
    spans = (VersionSpan(version=version, start=0, end=2),)
    calls = tuple(replace(call, version_spans=spans) for call in made.calls)
    (run / "rollouts").mkdir(exist_ok=True)
    write_rollouts(run / "rollouts" / f"step-{update:06d}.jsonl", [replace(made, calls=calls)])


def test_the_weights_of_a_step_are_those_of_the_line_before(run: Path) -> None:
    log(run, (2, 1, 0.25), (4, 2, None), (6, 3, 0.75))
    for update in (2, 6):
        save(run, update, version=0)
    step = saved_step(run, 6)
    assert (step.weights_update, step.num_steps, step.epoch) == (4, 2, 0.25)
    first = saved_step(run, 2)
    assert (first.weights_update, first.num_steps, first.epoch) == (0, 0, None)


def test_the_weights_of_the_first_line_of_a_resumed_run_are_those_that_sampled(run: Path) -> None:
    log(run, (6, 3, None))
    save(run, 6, version=4)
    assert saved_step(run, 6).weights_update == 4


def test_a_batch_that_trained_nothing_is_not_taken_for_the_one_before(run: Path) -> None:
    log(run, (1, 1, None), (2, 2, None), (2, 3, None))
    save(run, 2)
    assert saved_step(run, 2).num_steps == 1


def test_a_step_without_rollouts_or_metrics_is_refused_with_what_was_found(run: Path) -> None:
    log(run, (3, 1, None))
    with pytest.raises(ConfigError, match=r"found no saved rollouts.*logger\.save_rollouts=true"):
        saved_step(run, 3)
    for update in (1, 3):
        save(run, update)
    with pytest.raises(ConfigError, match="found step-000001 to step-000003; name another --step"):
        saved_step(run, 2)
    with pytest.raises(ConfigError, match="no line for update 1; name another --step"):
        saved_step(run, 1)
    (run / "rollouts" / "step-000003.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no rollouts"):
        saved_step(run, 3)
    assert saved_step(run, 3, has_rollouts=False).rollouts == ()


# Replays that are refused before a model is loaded


def test_only_rollouts_of_one_version_are_sampled_again(run: Path) -> None:
    write(run, "rollout.max_staleness=1")
    with pytest.raises(ConfigError, match=r"sampled ahead \(rollout\.max_staleness=1\)"):
        replay(run, step=1, sample=True, overrides=[], trusts_run=True)
    write(run, "algorithm.trains_on=demonstrations", f"data.path={run}/talks.jsonl")
    with pytest.raises(ConfigError, match="--sample needs a run with rollouts"):
        replay(run, step=1, sample=True, overrides=[], trusts_run=True)


def test_what_was_not_saved_with_a_step_is_not_replayed(run: Path) -> None:
    log(run, (1, 1, None))
    save(run, 1)
    config = Config()
    config.algorithm.advantage = "remax"
    with pytest.raises(ConfigError, match=r"needs greedy answers, which are not saved.*algorithm\.advantage=rloo"):
        Replay(run, config, FakeRank()).train(saved_step(run, 1))
    config = Config()
    config.demonstrations.path, config.demonstrations.teacher_divergence = "talks.jsonl", "forward_kl"
    with pytest.raises(ConfigError, match=r"teacher_divergence=off teacher\.path=null"):
        Replay(run, config, FakeRank()).train(saved_step(run, 1))


def test_several_processes_do_not_sample(run: Path) -> None:
    log(run, (1, 1, None))
    save(run, 1)
    with pytest.raises(ConfigError, match="--sample runs in one process"):
        Replay(run, Config(), FakeRank(world_size=2)).sample(saved_step(run, 1))


# The verdict


@pytest.mark.parametrize(
    ("logged", "found", "equal", "passes"),
    [
        ({"a": 0.1, "b": 2.0}, {"a": 0.1, "b": 2.0, "c": 5.0}, "2 of 2", {True: True, False: True}),
        ({"a": 0.1}, {"a": math.nextafter(0.1, 1)}, "0 of 1", {True: False, False: True}),
        ({"a": None}, {"a": math.inf}, "1 of 1", {True: True, False: True}),
        ({"a": None}, {"a": 0.0}, "0 of 1", {True: False, False: True}),
    ],
    ids=["equal", "one bit", "not finite", "finite now"],
)
def test_one_other_bit_is_a_failure_if_the_weights_are_exact(
    logged: dict[str, float | None],
    found: dict[str, float],
    equal: str,
    passes: dict[bool, bool],
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for is_exact, passed in passes.items():
        replayed = Replay(run, Config(), FakeRank())
        replayed._is_exact = is_exact
        assert replayed._compare(logged, found) is passed
        assert f"{equal} numbers are equal bit for bit" in capsys.readouterr().out
