"""A settings file on the command line: on top of presets, under typed words, with one sentence for each mistake."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checkpoint.run_dir import _label
from lockstep.trainer.cli import launch
from lockstep.trainer.command_line import settings_files
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from lockstep.trainer.run.next_steps import next_steps
from lockstep.trainer.settings_file import _read, describe_command, settings_file, with_file
from scripts.check_environment import overrides_of, parse
from tests.fixtures.composed import composed

Launched = Callable[..., Config]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _read.cache_clear()


def write(text: str, name: str = "my_run.yaml") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Compose as scripts/train.py, without the checks that need files."""

    def compose(*words: str) -> Config:
        configs: list[Config] = []
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", *words])
        launch(configs.append, check=lambda config: None)
        assert sys.argv[1:] == list(words)
        (config,) = configs
        return config

    return compose


@pytest.fixture
def refused(launched: Launched, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the sentences of a command line that ends with status 2."""

    def sentence(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            launched(*words)
        assert stop.value.code == 2
        return capsys.readouterr().err

    return sentence


def test_a_file_goes_on_top_of_presets_and_typed_words_on_top_of_it(launched: Launched) -> None:
    file = write("defaults: [{algorithm: ppo}, {experiment: gsm8k_lora}]\noptimizer: {lr: 1e-6}\nupdates: 5\nseed: 3\n")
    config = launched(file, "updates=7")
    assert config == composed(
        "algorithm=ppo", "experiment=gsm8k_lora", "optimizer.lr=1e-6", "updates=5", "seed=3", "updates=7"
    )
    assert config.algorithm.advantage == "gae", "the preset of the file stands against that of its experiment"


def test_a_file_may_be_empty_and_stand_anywhere_on_the_command_line(launched: Launched) -> None:
    assert launched("updates=3", write("# nothing yet\n", "deep/run.yml"), "seed=1") == composed("updates=3", "seed=1")


def test_names_of_lockstep_do_not_collide_with_those_of_the_user(launched: Launched) -> None:
    write("name: mine", "own/data/gsm8k.yaml")
    write("updates: 1", "own/schema.yaml")
    config = launched(write("defaults: [{data: gsm8k}]\nupdates: 5\n", "own/train.yaml"))
    assert (config.updates, config.data.path) == (5, "openai/gsm8k")


@pytest.mark.parametrize(
    "text",
    ["override /algorithm: ppo", "/algorithm: ppo", "algorithm: ppo, correction: off"],
)
def test_presets_may_be_written_as_hydra_writes_them(text: str, launched: Launched) -> None:
    config = launched(write(f"defaults: [train, {{{text}}}]\nupdates: 5"))
    assert (config.algorithm.advantage, config.updates) == ("gae", 5)
    assert config.correction.mode == ("off" if "correction" in text else "token_truncate")


def test_free_form_settings_of_the_file_are_merged_and_keep_any_text(launched: Launched) -> None:
    prompt = 'It\'s a \\ "test":\nwrite ${x}'.replace("${x}", "{x}")
    write(OmegaConf.to_yaml({"data": {"system_prompt": prompt}, "environment": {"settings": {"a b": {"c": [1, "x"]}}}}))
    config = launched("my_run.yaml", "environment.settings.more=2")
    assert config.data.system_prompt == prompt
    assert config.environment.settings == {"a b": {"c": [1, "x"]}, "more": 2}


def test_interpolations_of_the_environment_and_of_other_settings_are_resolved(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWS", "/rows")
    config = launched(write("updates: ${seed}\nseed: ${oc.env:NOT_SET,7}\ndata: {path: '${oc.env:ROWS}/a.jsonl'}"))
    assert (config.updates, config.data.path) == (7, "/rows/a.jsonl")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("algorithm: ppo", "my_run.yaml: algorithm: found ppo, expected settings; write defaults: [{algorithm: ppo}]"),
        ("experiment: demo", "experiment: found demo, expected settings; write defaults: [{experiment: demo}]"),
        ("model: Qwen/Q", "my_run.yaml: model: found Qwen/Q, expected settings; write model: {path: Qwen/Q}"),
        ("reward: my.py:f", "reward: found my.py:f, expected settings; write reward: {functions: [my.py:f]}"),
        ("optimizer.lr: 0.1", "my_run.yaml: optimizer.lr has dots, expected nested settings; write optimizer: {lr: 0."),
        ("model: {lora.rank: 8}", "my_run.yaml: model.lora.rank has dots, expected nested settings; write model: {lor"),
        ("optimizer:", "my_run.yaml: optimizer: found nothing, expected settings; indent them below optimizer:"),
        ("model: {lora: 3}", "my_run.yaml: model.lora: found 3, expected settings; indent them below model.lora:"),
        ("learning_rate: 1", "my_run.yaml: learning_rate is not a setting (did you mean 'optimizer.lr'?); write optim"),
        ("optimizer: {lrr: 1}", "my_run.yaml: optimizer.lrr is not a setting (did you mean 'optimizer.lr'?); write op"),
        ("zzzz: 1", "my_run.yaml: zzzz is not a setting; `--cfg job` prints all of them"),
        ("updates: many", "my_run.yaml cannot be read as settings: updates: found many, expected integer"),
        ("reward: {functions: f}", "my_run.yaml: reward.functions: found f, expected a list; write reward: {functions"),
        ("correction: {mode: off}", "my_run.yaml: correction.mode: found false, as YAML reads off, no, on, yes; wr"),
        ("run_name: '${hydra:job.name}'", "my_run.yaml: run_name: found ${hydra:job.name}, expected a value"),
        ("logger: {project: <redacted>}", "my_run.yaml: logger.project: found <redacted>, expected a value; write the"),
        ("defaults: [{algoritm: ppo}]", "defaults: algoritm is not a group (did you mean 'algorithm'?); expected one"),
        ("defaults: [{slurm: servers}]", "my_run.yaml: defaults: slurm is not a group"),
        ("defaults: [{algorithm: ppoo}]", "defaults: algorithm: ppoo does not exist (did you mean 'ppo'?); expected o"),
        ("defaults: [{model: a/b}]", "defaults: model: a/b does not exist; expected one of: calculator, chain, revers"),
        ("defaults: {algorithm: ppo}", "expected a list; write defaults: [{algorithm: ppo}]"),
        ("defaults: [algorithm=ppo]", "found algorithm=ppo, expected groups with a preset; write defaults: [{algorith"),
        ("defaults: [{algorithm: ppo}, {algorithm: dapo}]", "defaults: found algorithm twice, expected once; delete o"),
        ("- updates", "my_run.yaml: found a list, expected settings by name; write them as optimizer: {lr: 1e-6}"),
        ("updates=3", "my_run.yaml: found a single value, expected settings by name"),
        ("updates: 3\nupdates: 4", "my_run.yaml, line 2: updates is set twice, expected once; delete one of the two"),
        ("optimizer: {lr: 1, lr: 2}", "my_run.yaml, line 1: lr is set twice, expected once"),
        ("optimizer:\n\tlr: 3", "my_run.yaml, line 2: found character '\\t' that cannot start any token; expected YAM"),
        ("run_name: a: b", "my_run.yaml, line 1: mapping values are not allowed here; expected YAML: put texts with :"),
        ("run_name: ${a", "my_run.yaml: no viable alternative at input '${a'; expected YAML: put texts with :"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_gets_one_sentence(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_file([write(text)])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_on_the_command_line_beside_a_file_gets_one_sentence(refused: Callable[..., str]) -> None:
    file = write("updates: 3")
    write("seed: 1", "other.yaml")
    Path("folder.yaml").mkdir()
    for words, expected in (
        (
            [file, "other.yaml"],
            "found two settings files, my_run.yaml and other.yaml, expected one; put the settings of",
        ),
        (["my_rum.yaml"], "there is no settings file my_rum.yaml (did you mean 'my_run.yaml'?); type the path of one"),
        (["folder.yaml"], "folder.yaml is a directory, expected a YAML file of settings"),
        ([file, "--config-name=x"], "--config-name=x takes the place of configs/train.yaml, which my_run.yaml needs"),
        ([file, "updates=oops"], "updates: found oops, expected integer; set updates=80"),
        ([file, "updates=", "7"], "updates= and 7 are two words"),
        (
            ["--config", file],
            "--config is not an option: settings are typed as key=value, a YAML file of them by its path",
        ),
    ):
        sentence = refused(*words)
        assert expected in sentence
        assert sentence.startswith("lockstep: ")
        assert len(sentence.splitlines()) == 1


def test_values_of_options_and_settings_are_no_files() -> None:
    words = ["--config-dir", "a.yaml", "data.path=b.yaml", "~reward.settings.yaml", "--c.yaml", "d.YML", "e.yaml"]
    assert settings_files(words) == ["d.YML", "e.yaml"]


def test_paths_of_the_file_lead_beside_it_if_they_exist_there(launched: Launched) -> None:
    for name in ("rows.jsonl", "r.py", "Qwen/Q/config.json", "saved/step-1.jsonl", "numeric"):
        write("", f"task/{name}")
    Path("task/runs").mkdir()
    text = """
        model: {path: Qwen/Q, adapters: {a: Qwen/Q, b: Qwen/R}}
        data: {path: rows.jsonl, heldout_path: openai/gsm8k}
        eval: {sets: {a: {path: rows.jsonl}, b: {path: x.jsonl}}}
        demonstrations: {path: "rollouts:saved"}
        environment: {name: "r.py:Env", settings: {files: ["r.py:f,g", "absent.py:h"], note: rows.jsonl}}
        reward: {functions: [numeric, "r.py:f"]}
        run_root: runs
    """
    write(text, "task/my_run.yaml")
    config = launched("task/my_run.yaml", "teacher.path=rows.jsonl")
    assert config.model.path == "task/Qwen/Q"
    assert config.model.adapters == {"a": "task/Qwen/Q", "b": "Qwen/R"}
    assert (config.data.path, config.data.heldout_path) == ("task/rows.jsonl", "openai/gsm8k")
    assert {name: one.path for name, one in config.eval.sets.items()} == {"a": "task/rows.jsonl", "b": "x.jsonl"}
    assert config.demonstrations.path == "rollouts:task/saved"
    assert config.environment.name == "task/r.py:Env"
    assert config.environment.settings == {"files": ["task/r.py:f,g", "absent.py:h"], "note": "rows.jsonl"}
    assert config.reward.functions == ["numeric", "task/r.py:f"], "a name of a function is not a path"
    assert config.run_root == "runs", "a run is written where the user stands"
    assert config.teacher.path == "rows.jsonl", "typed"


def test_the_start_lines_say_what_the_file_keeps_beside_a_typed_preset(launched: Launched) -> None:
    file = write("defaults: [{algorithm: ppo}]\nalgorithm: {clip_high: 0.9, clip_low: 0.2}\noptimizer: {lr: 1e-5}\n")
    config = launched(file, "algorithm=dapo", "model.path=m", "reward=numeric")
    assert (asdict(config.algorithm)["clip_high"], config.algorithm.name) == (0.9, "dapo")
    lines = describe_command(config).splitlines()
    assert f"{'kept':<14} algorithm.clip_high=0.9 of my_run.yaml, beside algorithm=dapo" in lines
    words = [file, "experiment=gsm8k_lora", "algorithm.clip_high=0.3"]
    text = describe_command(launched(*words))
    assert "algorithm=ppo, optimizer.lr=1e-05 of my_run.yaml, beside experiment=gsm8k_lora" in text
    assert "typed twice" not in text
    words = [file, "algorithm=dapo", "algorithm.clip_high=0.3", "algorithm.clip_high=0.4"]
    text = describe_command(launched(*words))
    assert "kept" not in text
    assert "typed twice" in text


def test_settings_of_the_file_count_as_typed(launched: Launched, refused: Callable[..., str]) -> None:
    demo = "defaults: [{experiment: demo}]\n"
    own = write(f"{demo}data: {{path: own.jsonl}}\n")
    assert "own.jsonl is not data of the demo" in refused(own)
    own = write(
        "defaults: [{experiment: demo}, {environment: single_turn}]\nreward: {functions: [numeric]}\n"
        "data: {path: own.jsonl, heldout_path: data/demo/calculator/heldout.jsonl}\n",
        "both.yaml",
    )
    assert launched(own).data.heldout_path == "data/demo/calculator/heldout.jsonl"
    text = describe_command(launched(own))
    assert "kept           model of experiment=demo, beside another data, environment, reward" in text


def save(name: str, *words: str) -> Config:
    config = composed("model.path=m", "data.path=d.jsonl", "reward=numeric", f"run_name={name}", *words)
    write(OmegaConf.to_yaml(plain(config)), f"runs/{name}/config.yaml")
    return config


def test_a_file_beside_resume_is_typed_again_on_the_settings_of_the_run(
    launched: Launched, refused: Callable[..., str]
) -> None:
    saved = save("x", "optimizer.lr=1e-5", "updates=9", "seed=4")
    file = write("run_name: x\nupdates: 20\nalgorithm: {clip_high: 0.9}\n")
    config = launched(file, "resume=auto", "updates=30")
    assert (config.optimizer.lr, config.seed, config.updates, asdict(config.algorithm)["clip_high"]) == (
        1e-5,
        4,
        30,
        0.9,
    )
    config.updates, config.resume, config.algorithm = 9, "never", saved.algorithm
    assert config == saved
    other = write("run_name: x\nresume: auto\ndata: {path: other.jsonl}\n", "other.yaml")
    assert "learns another task than this command: data.path (d.jsonl -> other.jsonl)" in refused(other)


def test_a_secret_of_the_file_need_not_be_typed_at_a_resume(launched: Launched, refused: Callable[..., str]) -> None:
    save("x", "environment.settings.api_key=abc")
    assert "does not hold the secrets of the run" in refused("resume=auto", "run_name=x")
    file = write("environment: {settings: {api_key: abc}}\n")
    assert launched(file, "resume=auto", "run_name=x").environment.settings == {"api_key": "abc"}


def test_the_commands_at_the_end_of_a_run_hold_what_the_file_set(launched: Launched) -> None:
    text = """
        run_root: own_runs
        model: {path: m, lora: {rank: 8}}
        data: {path: d.jsonl, heldout_path: e.jsonl, columns: {prompt: task}, system_prompt: "It's short."}
        reward: {functions: [numeric]}
        environment: {settings: {api_key: abc}}
    """
    words = [write(text), "optimizer.lr=1e-5", "data.path=typed.jsonl"]
    config = launched(*words)
    run = Path("own_runs/a")
    lines = next_steps(
        config, with_file(words), run=run, model=run / "model", update=80, launcher="python", trackers={}
    ).splitlines()
    commands = {line.split()[0]: shlex.split(line[14:])[2:] for line in lines}
    assert commands["resume"] == [
        "run_root=own_runs", "environment.settings.api_key=<redacted>", "run_name=a", "resume=auto", "updates=160"
    ]  # fmt: skip
    again = composed(*(word for word in commands["evaluate"] if "<redacted>" not in word))
    assert (again.data, again.reward, again.model.path) == (config.data, config.reward, "own_runs/a/model")
    assert again.model.lora.rank == 0, "the saved model is merged"


def test_a_run_without_a_name_is_named_after_its_file() -> None:
    assert _label("my.py:Env", ["train.py", "tasks/sums.yaml", "experiment=demo"]) == "sums"


def test_a_file_that_changes_while_the_run_lasts_is_not_read_again() -> None:
    file = write("updates: 3")
    assert with_file([file, "seed=1"]) == ["updates=3", "seed=1"]
    Path(file).unlink()
    assert with_file([file, "seed=1"]) == ["updates=3", "seed=1"]


def test_an_environment_of_the_file_is_examined() -> None:
    flags, settings = parse(["my_run.yaml", "--data", "d.jsonl", "seed=1"])
    assert [*overrides_of(flags), *settings] == ["my_run.yaml", "data.path=d.jsonl", "data.heldout_path=null", "seed=1"]


def test_presets_of_the_users_own_folder_may_be_named(launched: Launched) -> None:
    write("clip_high: 0.7", "own/algorithm/mine.yaml")
    file = write("defaults: [{algorithm: mine}]")
    assert asdict(launched(file, "--config-dir=own").algorithm)["clip_high"] == 0.7


def test_the_composed_configuration_is_printed_without_torch() -> None:
    file = write("optimizer: {lr: 1e-6}\ndata: {path: d.jsonl}")
    code = (
        "import sys\nfrom lockstep.trainer.cli import launch\n"
        f"sys.argv = ['train.py', {file!r}, '--cfg', 'job', 'seed=5']\nlaunch(print)\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for line in ("  lr: 1.0e-06", "  path: d.jsonl", "seed: 5", "[]"):
        assert line in done.stdout.splitlines()
    assert {path.name for path in Path().iterdir()} == {"my_run.yaml"}, "Hydra writes nothing"


def test_an_empty_value_of_a_setting_without_default_is_none(launched: Launched, refused: Callable[..., str]) -> None:
    file = write("model: {path: ''}\nreward: {functions: []}\ndata: {path: rows.jsonl}\nseed: 3\n")
    assert launched(file, "reward=numeric", "model.path=m").reward.functions == ["numeric"]
    assert "kept" not in describe_command(launched(file, "reward=numeric"))
    assert launched(write("reward: {functions: [exact_match]}\n", "b.yaml"), "reward=numeric").reward.functions == [
        "exact_match"
    ]


def test_an_error_names_what_the_file_keeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("model: {path: m}\nreward: {functions: [exact_match]}\n")
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", file, "reward=numeric"])
    with pytest.raises(SystemExit):
        launch(lambda config: None)
    error = capsys.readouterr().err
    assert "data.path is not set" in error
    assert "kept: reward.functions=[exact_match] of my_run.yaml, beside reward=numeric" in error
