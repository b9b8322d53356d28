"""Command line: every config file composes; every mistake gets one sentence with a fix, before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.validate import validate
from lockstep.trainer.cli import launch
from lockstep.trainer.compose import CONFIG_DIR, drop_prepared_heldout
from tests.fixtures.composed import demo as composed

ROOT = CONFIG_DIR.parent
LAUNCHERS = ("accelerate", "kubernetes", "skypilot", "dstack")
GROUP_FILES = sorted(
    path.relative_to(CONFIG_DIR).with_suffix("")
    for path in CONFIG_DIR.glob("*/*.yaml")
    if path.parent.name not in LAUNCHERS
)


@pytest.fixture
def complete(tmp_path: Path) -> tuple[str, ...]:
    """Return overrides with which all files of a run exist."""
    (tmp_path / "config.json").write_text("{}")
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1+1", "answer": "2"}\n')
    return (f"model.path={tmp_path}", f"data.path={data}", "data.heldout_path=null")


def test_prepared_heldout_data_is_left_out_with_other_training_data() -> None:
    for words, expected in (
        ([], "data/demo/calculator/heldout.jsonl"),
        (["data.path=data/demo/calculator/train_2.jsonl"], "data/demo/calculator/heldout.jsonl"),
        (["data.path=my.jsonl"], None),
        (["data.sources.a.path=my.jsonl"], None),
        (["data.sources.a.path=data/demo/a.jsonl", "data.sources.b.path=b"], "data/demo/calculator/heldout.jsonl"),
        (["data.path=my.jsonl", "data.heldout_path=data/demo/x.jsonl"], "data/demo/x.jsonl"),
        (["data.path=my.jsonl", "data.heldout_path=other.jsonl"], "other.jsonl"),
        (["data=gsm8k", "data.path=my.jsonl"], "openai/gsm8k"),
        (["data=real"], "data/real/names/heldout.jsonl"),
        (["data=real", "data.path=data/real/words/train.jsonl"], "data/real/names/heldout.jsonl"),
        (["data=real", "data.path=my.jsonl"], None),
    ):
        config = composed(*words)
        drop_prepared_heldout(config.data, words)
        assert config.data.heldout_path == expected, words


NEEDS_A_SETTING = {
    "agent": "agent=path",
    "mcp": "servers={",
    "tools": "files=.my_tools.py",
    "trl": "factory=path",
    "trl_rollout": "rollout_func=path",
    "verifiers": "env_id=<id",
}
"""Environments that need a setting of the user, and the start of its override."""
CONVERSATION = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]}


@pytest.mark.parametrize("path", [path for path in GROUP_FILES if path.name not in NEEDS_A_SETTING], ids=str)
def test_every_config_file_composes_and_validates(
    path: Path, complete: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a row with the columns of all ready data sets; tests/unit/trainer/data/test_ready_data.py tests each alone."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # optional packages count as installed
    monkeypatch.setenv("WANDB_API_KEY", "k")  # as after `wandb login`
    columns = ("question", "answer", "prompt", "problem", "solution", "query", "answers", "reasoning_gym")
    row = dict.fromkeys(columns, "1") | {"reward_model": {"ground_truth": {"target": "1"}}}
    row |= {"env_id": "GuessTheNumber-v0", "seed": 1, "links": [{"key": "a", "value": "b"}]}
    row["square"] = [40, 40, 32, "red", "rows"]
    if path.name == "tool_calls":
        row |= {"answer": "[]", "answers": "[]"}
    rows = tmp_path / "all.jsonl"
    rows.write_text(json.dumps(row | CONVERSATION if path.name == "sft" else row) + "\n")
    own = [f"data.path={rows}", f"data.heldout_path={rows}"]  # the second for experiments with evaluation
    config = composed(f"{path.parent}={path.name}", *complete, *own)
    if path.name.startswith("opd"):
        config.teacher.path = config.model.path
    if "model" in config.reward.settings:
        config.reward.settings["model"]["path"] = config.model.path
    validate(config)


def test_every_file_under_configs_has_a_test() -> None:
    """This module composes groups and train.yaml, test_packaging.py and test_launching.py read the launch files, and
    test_ready_data.py composes train_reward_model.yaml."""
    found = {path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml")}
    groups = {path.with_suffix(".yaml") for path in GROUP_FILES}
    launch_files = {path for path in found if path.parent.name in LAUNCHERS}
    assert found - groups - launch_files == {Path("train.yaml"), Path("train_reward_model.yaml")}


@pytest.mark.parametrize(("name", "override"), NEEDS_A_SETTING.items())
def test_an_environment_without_its_required_setting_names_the_override(
    name: str, override: str, complete: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=f"set '?environment.settings.{override}"):
        validate(composed(f"environment={name}", *complete))


def test_defaults_are_the_schema_or_a_group_value(complete: tuple[str, ...]) -> None:
    config = composed(*complete)
    assert config.algorithm.loss == "ppo_clip"
    assert config.correction.mode == "token_truncate"
    assert config.correction.high == 2.0


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt=8"]),
        (["algorithm.minibatches=7"], ["algorithm.minibatches=8"]),
        (["rollout.top_p=0.9"], ["rollout.top_p=1.0", "support"]),
        (["rollout.top_p=0.9"], ["rollout.replay_support=true rollout.top_k=20"]),
        (["rollout.top_k=50", "rollout.replay_support=true"], ["rollout.top_k=20", "whole support"]),
        (["rollout.replay_support=true"], ["rollout.replay_support=false"]),
        (["rollout.temperature=0"], ["must be greater than 0; set rollout.temperature=1.0"]),
        (["algorithm.loss=ppo_clp"], ["ppo_clip", "did you mean"]),
        (["correction.logp_old=bypass", "algorithm.epochs=2"], ["correction.logp_old=recompute"]),
        (["share_prefixes=always", "model.attn_implementation=sdpa"], ["share_prefixes=auto"]),
        (["correction.low=3"], ["correction.low=0.5"]),
        (["reward.functions=[]"], ["reward.functions is not set", "reward=numeric"]),
        (["reward.functions=[exact_mach]"], ["did you mean 'exact_match'", "path/to/file.py:function"]),
        (["reward.functions=[nowhere.py:score]"], ["no file nowhere.py"]),
        (["reward.functions=[scripts/train.py:absent]"], ["scripts/train.py has no function 'absent'; it has "]),
        (["reward.functions=[model]"], ["set reward.settings.model.path=<directory or hub id>"]),
        (["reward.functions=[model]", "reward.settings.model.path=runs/a/model"], ["lockstep train-reward-model"]),
        (["reward.functions=[numeric,numeric]"], ["named numeric", "set reward.functions=[numeric]"]),
        (["reward.functions=[a.py:score,b.py:score]"], ["named score", "give one of the two another name"]),
        (["reward.weights=[nan]"], ["nan, which is not a finite number; set reward.weights=null"]),
        (["reward.weights=[-inf]"], ["set reward.weights=null"]),
        (["reward.settings.demo_answer.foo=1"], ["it takes no settings: leave out reward.settings.demo_answer.foo"]),
        (["reward.settings.demo_answer=3"], ["set reward.settings.demo_answer.<name>=<value>"]),
        (["reward.settings.demo_anser.foo=1"], ["did you mean 'demo_answer'", "'~reward.settings.demo_anser'"]),
        (["reward.functions=[llm_judge]"], ["set reward.settings.llm_judge.url=<value>"]),
        (
            ["reward.functions=[numeric]", "reward.settings.numeric.tolerance=1"],
            ["column, after, rel_tol, abs_tol: leave out reward.settings.numeric.tolerance"],
        ),
        (
            ["reward.functions=[model]", "reward.settings.model={path: a/b, top: 1}"],
            ["leave out reward.settings.model.top"],
        ),
        (
            ["reward.functions=[model]", "reward.settings.model={path: a/b, stop: x}"],
            ["set reward.settings.model.input=t"],
        ),
        (["reward.functions=[model]", "reward.settings.model=3"], ["reward.settings.model.<name>=<value>"]),
        (["sync.canary_threshold=-1"], ["must be greater than 0; set sync.canary_threshold=null"]),
        (["sync.canary_threshold=0"], ["set sync.canary_threshold=null"]),
        (["logger.peak_tflops=0"], ["set logger.peak_tflops=null"]),
        (["environment.name=calculater"], ["did you mean 'calculator'"]),
        (["environment.settings.color=red"], ["environment calculator", "'color'"]),
        (["reward.functions=[a,b]", "reward.weights=[1.0]"], ["reward.weights=null"]),
        (["algorithm=dapo", "rollout.samples_per_prompt=1"], ["algorithm.dynamic_sampling=false"]),
        (["algorithm.overlong_buffer=32"], ["must be between 0 and 1; set algorithm.overlong_buffer=0.0"]),
        (["algorithm.kl_coef=-1"], ["must be at least 0; set algorithm.kl_coef=0.0"]),
        (["algorithm.kl_estimator=k4"], ["k3", "unbiased"]),
        (["model.reference_path=models/nothing", "algorithm.kl_coef=1"], ["model.reference_path=null"]),
        (["correction.kl_penalty=0.1", "correction.logp_old=bypass"], ["correction.logp_old=recompute"]),
        (["correction.logp_old=bypass"], ["correction.mode=token_truncate has no effect", "correction=bypass"]),
        (["correction=bypass", "correction.rejection={token_k3: 0.1}"], ["'correction.rejection={}'"]),
        (["algorithm=rloo", "correction=bypass"], ["set correction.logp_old=recompute, or algorithm.loss=ppo_clip"]),
        (
            ["correction=bypass", "algorithm.kl_coef=0.1", "algorithm.kl_place=reward"],
            ["set algorithm.kl_place=loss, or correction.logp_old=recompute"],
        ),
        (["correction.rejection={seq_max_k1: 2}"], ["did you mean 'seq_max_k", "seq_mean_k3: 0.01"]),
        (["correction.rejection={token_k1: 0.5}"], ["set correction.rejection.token_k1=2.0"]),
        (["correction.rejection={token_k2: 0}"], ["set correction.rejection.token_k2=0.01"]),
        (["algorithm.clip_low=null"], ["algorithm.loss=ppo_clip needs a value; set algorithm.clip_low=0.2"]),
        (["algorithm.dual_clip=0.5"], ["must be greater than 1; set algorithm.dual_clip=null"]),
        (["algorithm.clip_low=-0.1"], ["set algorithm.clip_low=0.2"]),
        (["algorithm.normalizer=mean"], ["is not one of grpo, dr_grpo, token"]),
        (["algorithm=sapo", "algorithm.tau_positive=0"], ["must be greater than 0; set algorithm.tau_positive=1.0"]),
        (["algorithm=clipped_tis", "algorithm.importance_sampling_level=batch"], ["is not one of token, sequence"]),
        (["algorithm=ppo", "algorithm.gamma=1.5"], ["must be between 0 and 1; set algorithm.gamma=1.0"]),
        (["correction.mode=token"], ["is not one of token_truncate, token_mask"]),
        (["algorithm=ppo", "model.critic=shared", "model.critic_path=m/n"], ["model.critic=separate"]),
        (["algorithm=ppo", "model.critic_path=models/nothing"], ["set model.critic_path=null"]),
        (["rollout.max_tokens_per_turn=512"], ["rollout.max_model_len=2048"]),
        (["eval.every=5"], ["data.heldout_path=", "eval.every=0"]),
        (["eval.before_training=true"], ["eval.before_training=false"]),
        (["eval.samples_per_prompt=4"], ["eval.temperature=1.0"]),
        (["eval.pass_reward=exact"], ["demo_answer", "eval.pass_reward=null"]),
        (["eval.prompts=0"], ["must be at least 1; set eval.prompts=128"]),
        (["eval.compare_to=x.json"], ["eval.output=x.json"]),
        (["eval.sets.a.path=nowhere.jsonl"], ["set eval.sets.a.path=<file or hub id>"]),
        (["eval.sets.a.path=d", "eval.sets.a.environment=tools"], ["environment.name=mixed"]),
        (["data.sources.a.pth=d"], ["did you mean 'path'"]),
        (["data.sources.a=3"], ["set data.sources.a.path=<file or hub id>"]),
        (["data.sources.a.path=d", "data.sources.a.weight=many"], ["data.sources.a.weight: found many"]),
        (["data.sources.a.path=d", "data.sources.a.weight=0"], ["must be greater than 0"]),
        (["data.sources.a.weight=1"], ["set data.sources.a.path=<file or hub id>"]),
        (["data.columns={prompt: q}"], ["has no column q", "question, answer"]),
        (["data.columns={answer: null}"], ["needs column 'answer'", "data.columns={answer: <column>}"]),
        (
            ["data.columns={question: null}", "environment=single_turn"],
            ["no messages or prompt or question; it has answer", "data.columns={prompt: answer}"],
        ),
        (["data.system_prompt=hi", "environment.settings.prompt_column=q"], ["prompt_column=null"]),
        (["environment.name=agent", "data.max_prompt_tokens=9"], ["data.max_prompt_tokens=null"]),
        (["data.curriculum.rest_epochs=1", "data.curriculum.min_pass_rate=1"], ["min_pass_rate=0.0"]),
        (["data.curriculum.weighting=pools", "data.curriculum.min_pass_rate=1"], ["min_pass_rate=0.0"]),
        (["data.curriculum.weighting=learnability", "data.curriculum.min_weight=0"], ["between 0.01 and 1"]),
        (["resume=auto"], ["run_name="]),
        (["run_name=a/b"], ["run_name=my-run"]),
        (["run_name=" + 256 * "a"], ["at most 255 bytes", "run_name=my-run"]),
        (["resume="], ["resume= is neither never, auto nor a checkpoint"]),
        ([f"resume={'x' * 300}"], ["is neither never, auto nor a checkpoint (it does not exist)"]),
        (["resume='~no-such-user'"], ["resume=~no-such-user is neither never, auto nor a checkpoint"]),
        (["run_name="], ["run_name= is empty", "set run_name=my-run"]),
        (["resume=auto", "run_name='  '"], ["run_name= is empty", "set run_name=my-run"]),
        (["hub.repo=mine"], ["set hub.repo=<user or organization>/<name>"]),
        (["model.path=models/nothing"], ["model.path=<directory or hub id>"]),
        (["data.path=nowhere.jsonl"], ["data.path=<file or hub id>"]),
        (["optimizer.lr=0"], ["optimizer.lr=0.0 must be greater than 0", "set optimizer.lr=null"]),
        (["optimizer.lr=inf"], ["set optimizer.lr=null"]),
        (["rollout.temperature=nan"], ["set rollout.temperature=1.0"]),
        (["algorithm.clip_high=nan"], ["set algorithm.clip_high=0.28"]),
        (["seed=-1"], ["set seed=0"]),
        (["model.lora.rank=-1"], ["set model.lora.rank=0"]),
        (["rollout.top_k=4", "rollout.top_p=2", "rollout.replay_support=true"], ["set rollout.top_p=1.0"]),
        (["algorithm.max_completion_tokens=-5"], ["set algorithm.max_completion_tokens=null"]),
        (["optimizer.final_lr_fraction=-3"], ["set optimizer.final_lr_fraction=0.0"]),
        (["optimizer.betas=[0.9]"], ["optimizer.betas=[0.9,0.95]"]),
        (["updates=0"], ["must be at least 1; set updates=80"]),
        (["rollout.max_staleness=-1"], ["set rollout.max_staleness=0"]),
        (["rollout.max_staleness=1", "algorithm.minibatches=4"], ["set rollout.max_staleness=4"]),
        (
            ["rollout.max_staleness=1", "correction=bypass"],
            ["correction.logp_old=recompute", "correction.mode=token_tr"],
        ),
        (["rollout.max_staleness=1", "correction=none"], ["set correction.mode=token_truncate"]),
        (["rollout.max_staleness=1", "sync.pause=abort"], ["set sync.pause=keep"]),
        (
            ["rollout.max_staleness=1", "environment=agent", "gateway.port=8000", "eval.every=5"],
            ["set gateway.port=0", "eval.every=0"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_problem_is_reported_with_an_override_that_fixes_it(
    overrides: list[str], names: list[str], complete: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        validate(composed(*complete, *overrides))
    for name in names:
        assert name in str(error.value)


def test_held_out_data_without_the_columns_of_the_users_data_can_be_left_out(
    complete: tuple[str, ...], tmp_path: Path
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"task": "1+1", "answer": "2"}\n')
    overrides = (*complete, f"data.path={own}", "data.columns={prompt: task}")
    validate(composed(*overrides))
    with pytest.raises(ConfigError, match=r"has no column task.*; or set data\.heldout_path=null"):
        validate(composed(*overrides, f"data.heldout_path={tmp_path}/rows.jsonl"))


def test_truncated_sampling_is_accepted_with_replay_support(complete: tuple[str, ...]) -> None:
    validate(composed(*complete, "rollout.top_k=20", "rollout.top_p=0.9", "rollout.replay_support=true"))


def test_all_problems_are_reported_at_once(complete: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        validate(composed(*complete, "rollout.top_p=0.9", "updates=0"))
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("algorithm.clip_hgh=0.3", "did you mean 'algorithm.clip_high'"),
        ("optimizer.learning_rate=1e-5", "did you mean 'optimizer.lr'"),
        ("num_generations=8", "did you mean 'rollout.samples_per_prompt'"),
        ("+algorithm.extra=1", "algorithm.extra is not a setting"),
        ("optimizer.lr=fast", "optimizer.lr: found fast, expected float; leave optimizer.lr out for the default"),
        ("algorithm=dr_grop", "did you mean 'dr_grpo'"),
        ("algorithm=gpro", "did you mean 'grpo'"),
        ("model.path=models/nothing", "model.path=models/nothing has no config.json"),
        ("nonsense", "nonsense is not key=value"),
    ],
)
def test_a_mistake_on_the_command_line_gets_one_line(argument: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/train.py", argument], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith("lockstep: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("rollout=5", "rollout=5 does not exist; expected one of: colocated, embedded, server"),
        ("model=[1,2]", "model=[1,2]"),
        ("model=null", "model=null does not exist; expected one of: calculator"),
        ("=3", "expected key=value"),
        ('run_name="abc', 'run_name="abc is not key=value'),
        ("model.path=null", "model.path: found null, expected a value; set it, for example model.path=Q"),
        ("optimizer.betas=3", "set optimizer.betas=[0.9,0.95]"),
        ("optimizer.betas=[a,0.9]", "optimizer.betas: found a, expected float; set optimizer.betas=[0.9,0.95]"),
        ("correction.rejection={token_k3: abc}", "set correction.rejection={}"),
        ("model.lora=null", "leave model.lora out"),
        (
            "model.load_in_4bit=true",
            "for QLoRA set model.path to a quantized checkpoint (docs/adapters.md) and model.lora.rank=16",
        ),
        ("model.path=${nothing}", "set it, for example model.path=Q"),
    ],
)
def test_a_value_of_the_wrong_type_gets_one_line_with_a_fix(
    argument: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", argument])
    monkeypatch.chdir(ROOT)
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as stop:
        launch(lambda config: None)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.startswith("lockstep: ")
    assert len(error.splitlines()) == 1


def test_a_mistake_is_found_before_torch_is_imported(complete: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.argv = ['train.py', 'experiment=demo', 'updates=0']\n"
        "from lockstep.trainer.cli import launch\n"
        "try: launch(print)\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_settings_of_a_reward_are_checked_before_the_environment_is_loaded(complete: tuple[str, ...]) -> None:
    """The environment may import transformers, which takes seconds."""
    code = (
        "import sys; sys.argv = ['train.py', 'experiment=demo', 'reward.settings.demo_answer.foo=1']\n"
        "from lockstep.trainer.cli import launch\n"
        "try: launch(print)\n"
        "except SystemExit as stop: print(stop.code)\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "leave out reward.settings.demo_answer.foo" in done.stderr
    assert done.stdout.split() == ["2", "[]"]


def test_a_setting_of_a_config_file_can_be_removed(complete: tuple[str, ...]) -> None:
    overrides = ("experiment=hh_ppo", "data=calculator", *complete, "reward.functions=[exact_match]", "eval.every=0")
    with pytest.raises(ConfigError, match=r"reward\.settings\.model is for a function that is not among"):
        validate(composed(*overrides))
    validate(composed(*overrides, "~reward.settings.model"))


def test_cfg_job_prints_the_resolved_settings() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/train.py", "--cfg", "job", "optimizer.lr=0.5"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert "lr: 0.5" in done.stdout


def test_free_form_settings_need_no_plus(complete: tuple[str, ...]) -> None:
    config = composed(*complete, "environment.settings.depth=3")
    assert config.environment.settings == {"depth": 3}


def test_an_override_replaces_the_reward_functions(complete: tuple[str, ...]) -> None:
    assert composed(*complete, "reward.functions=[exact_match]").reward.functions == ["exact_match"]
