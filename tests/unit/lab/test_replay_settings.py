"""Replays of a run that others wrote: its settings run no code, read no variable and name no address unasked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lockstep.lab.replay import settings_of
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose config names code, addresses and variables, and trusts the code of its models."""
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'fired')!r}, 'w').write('x')\n"
        "class Env:\n    tools = ()\n    def __init__(self, **settings): pass\n"
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
