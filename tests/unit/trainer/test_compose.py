"""Composition: no task by default, experiments that name a whole one, and parts of the demo refused on other data."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lockstep.rollout.environments import declaration
from lockstep.rollout.errors import ConfigError
from lockstep.trainer.checks.declared import missing_problems
from lockstep.trainer.checks.names import reward_name_problems
from lockstep.trainer.cli import launch
from lockstep.trainer.command_line import settings_files
from lockstep.trainer.compose import CONFIG_DIR, TASK, describe_task, drop_prepared_heldout, refuse_demo_parts, sets
from lockstep.trainer.config.schema import Config
from scripts.check_environment import overrides_of, parse
from tests.fixtures.composed import composed
from tests.fixtures.pages import PAGES, ROOT, bash_blocks

ALL = {"needs_data": True, "trains": True, "scores": True}
EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))


def missing(*words: str, **arguments: bool) -> list[str]:
    return [problem.partition(" ")[0] for problem in missing_problems(composed(*words), **(ALL | arguments))]


def test_model_data_and_reward_have_no_default_and_each_has_an_example() -> None:
    model, data, reward = missing_problems(Config(), **ALL)
    assert model == (
        "model.path is not set and has no default; set it, for example model.path=Qwen/Qwen2.5-0.5B-Instruct"
    )
    assert data.startswith("data.path is not set and has no default; set it, for example data.path=my.jsonl")
    assert "for example reward=numeric" in reward
    assert reward.endswith("or experiment=demo for the demo")
    assert Config().environment.name == "single_turn"


def test_only_what_a_command_needs_is_asked_for() -> None:
    assert missing("model.path=m") == ["data.path", "reward.functions"]
    assert missing("model.path=m", "data.sources.a.path=a.jsonl", "reward=numeric") == []
    assert missing("model.path=m", "data.path=a.jsonl", "algorithm=sft") == []
    assert missing("model.path=m", needs_data=False) == []  # a server
    assert missing("model.path=m", "data.path=a.jsonl", scores=False) == []  # a diagnosis
    assert missing("model.path=m", "data.heldout_path=a.jsonl", trains=False) == ["reward.functions"]
    assert missing("model.path=m", "eval.lm_eval.tasks=[gsm8k]", trains=False) == []
    assert missing("model.path=", "data.path=", "reward=numeric") == ["model.path", "data.path"]


def test_an_environment_without_a_preset_has_three_turns_and_single_turn_one() -> None:
    assert composed().max_turns == 1
    assert composed("environment.name=my.py:Env").max_turns == 3
    assert composed("environment.name=my.py:Env", "environment.max_turns=7").max_turns == 7
    assert composed().horizon == composed("environment=single_turn").horizon


@pytest.mark.parametrize("preset", sorted((CONFIG_DIR / "environment").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_has_the_turns_that_its_class_declares(preset: Path) -> None:
    config = composed(f"environment={preset.stem}")
    assert config.environment.max_turns is None, "the number belongs into the declaration of the class"
    assert config.max_turns == declaration(config.environment.name).max_turns


def parts_of(experiment: str) -> set[str]:
    """Return the parts of a task that an experiment, or those that it begins with, names."""
    content = yaml.safe_load((CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text())
    named = {part for part in TASK if content.get(part, {}).get({"reward": "functions"}.get(part, "path"))}
    for entry in content["defaults"]:
        if isinstance(entry, str):
            named |= parts_of(entry)
        else:
            named |= {key.removeprefix("override /") for key in entry} & TASK.keys()
    return named


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_names_a_whole_task(experiment: str) -> None:
    assert parts_of(experiment) == TASK.keys()
    assert missing(f"experiment={experiment}") == []


REFUSED = {
    "experiment=demo data.path=mine.jsonl": "environment calculator and reward demo_answer are for",
    "experiment=demo data=gsm8k": "environment calculator and reward demo_answer are for",
    "experiment=demo data=real": "environment calculator and reward demo_answer are for",
    "experiment=demo data.path=mine.jsonl reward=numeric": "environment calculator is for",
    "experiment=demo data.path=mine.jsonl environment=single_turn": "reward demo_answer is for",
    "experiment=chain data.path=mine.jsonl": "environment chain and reward demo_answer are for",
    "experiment=reverse ++data.path=mine.jsonl": "environment reverse and reward demo_answer are for",
    "experiment=demo data.sources.a.path=mine.jsonl": "environment calculator and reward demo_answer are for",
    "experiment=demo data.heldout_path=mine.jsonl": "environment calculator and reward demo_answer are for",
    "experiment=demo eval.sets.a.path=mine.jsonl": "environment calculator and reward demo_answer are for",
    "experiment=real_calculator data.path=mine.jsonl": "environment calculator is for",
    "experiment=demo environment.settings.tool_timeout_s=3 data.path=mine.jsonl": "environment calculator and reward",
}
ACCEPTED = (
    "experiment=demo",
    "experiment=real_calculator",
    "experiment=sft data.path=mine.jsonl",
    "experiment=demo model.path=mine",
    "experiment=demo data.heldout_path=null",
    "experiment=demo data.path=/tmp/data/demo/calculator/train.jsonl",
    "experiment=chain data.heldout_path=./data/demo/chain/heldout_harder.jsonl",
    "experiment=demo data.path=mine.jsonl environment=single_turn reward=numeric",
    "experiment=demo data.path=mine.jsonl environment.name=my.py:Env reward.functions=[my.py:f]",
    "model=calculator data.path=mine.jsonl environment=calculator reward=numeric",
)


def checked(words: list[str]) -> Config:
    config = composed(*words)
    drop_prepared_heldout(config.data, words)
    refuse_demo_parts(config, words)
    return config


@pytest.mark.parametrize(("words", "sentence"), REFUSED.items())
def test_a_part_of_the_demo_on_other_data_is_refused_unless_it_is_typed(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"is not data of the demo, which {sentence}.*set environment=single_turn"):
        checked(words.split())


@pytest.mark.parametrize("words", ACCEPTED)
def test_data_of_the_demo_and_typed_parts_are_accepted(words: str) -> None:
    checked(words.split())


def test_a_word_sets_its_own_setting_and_not_those_beside_it() -> None:
    assert sets(["data=gsm8k"], *TASK["data"])
    assert sets(["++data.sources.a.path=x"], *TASK["data"])
    assert not sets(["data.columns={prompt: task}", "model.dtype=float32"], *TASK["data"], *TASK["model"])
    assert not sets(["environment.max_turns=3"], *TASK["environment"])


def test_the_first_lines_name_the_task_with_its_tools() -> None:
    assert describe_task(composed("experiment=demo"), ["experiment=demo"]).splitlines() == [
        "model          models/calculator",
        "data           data/demo/calculator/train.jsonl",
        "environment    calculator with the tool calculator, at most 3 turns",
        "reward         demo_answer",
        "held out       data/demo/calculator/heldout.jsonl: not used, because eval.every=0",
    ]
    words = ["experiment=demo", "eval.every=5"]
    assert "held out" not in describe_task(composed(*words), words)


def test_the_first_lines_name_experimental_settings_that_are_not_at_their_default() -> None:
    words = ["experiment=demo", "rollout.quantization=fp8_per_channel", "model.compile=false"]
    *_, last = describe_task(composed(*words), words).splitlines()
    assert last == "experimental   rollout.quantization, not run on a GPU yet"


def test_held_out_data_that_is_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["data.path=mine.jsonl", "environment=single_turn", "reward=numeric"]
    sentence = "data/demo/calculator/heldout.jsonl is not held-out data of mine.jsonl, so it is left out"
    for words, is_said in (([], False), (own, True), ([*own, "data.heldout_path=null"], False)):
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", "experiment=demo", *words])
        launch(lambda config: None, check=lambda config: None)
        assert (sentence in capsys.readouterr().err) == is_said, words


def test_a_setting_that_is_typed_twice_is_named() -> None:
    words = ["experiment=demo", "seed=1", "eval.every=5", "seed=2"]
    assert describe_task(composed(*words), words).splitlines()[-1] == "typed twice    seed: the last one counts"


@pytest.mark.parametrize("given", ["5", "[1]", "text"])
def test_settings_of_an_own_reward_that_are_no_mapping_are_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def f(rollout):\n    return 1.0\n")
    words = ["experiment=demo", f"reward.functions=[{tmp_path}/my.py:f]", f"reward.settings.f={given}"]
    assert any(
        "is not a mapping of settings; set reward.settings.f.<name>" in p
        for p in reward_name_problems(composed(*words).reward)
    )


def test_a_path_beside_sources_is_refused() -> None:
    words = ["experiment=demo", "data.sources.a.path=a.jsonl", "environment=single_turn", "reward=numeric"]
    refuse_demo_parts(composed(*words), words)
    with pytest.raises(ConfigError, match=r"data\.sources\.more\.path=b\.jsonl"):
        refuse_demo_parts(composed(*words, "data.path=b.jsonl"), [*words, "data.path=b.jsonl"])


def test_the_first_lines_say_what_an_experiment_chose_beside_what_was_typed() -> None:
    words = ["experiment=gsm8k_lora", "data.path=mine.jsonl", "reward.functions=[numeric,my.py:brief]"]
    words += ["reward.weights=[1,0.5]"]
    lines = describe_task(composed(*words), words).splitlines()
    assert lines[1] == "data           mine.jsonl"
    assert lines[3] == "reward         numeric + 0.5 brief"
    assert lines[4] == "kept           model, environment of experiment=gsm8k_lora, beside another data, reward"


def test_the_first_lines_of_an_evaluation_name_the_heldout_data() -> None:
    words = ["experiment=demo", "eval.sets.mine.path=m.jsonl"]
    lines = describe_task(composed(*words), words, trains=False).splitlines()
    assert lines[1] == "data           data/demo/calculator/heldout.jsonl, mine: m.jsonl"


TAKE_SETTINGS = "train|evaluate|diagnose|serve[-_]engine|serve|check[-_]environment"


def page_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield script and words of the commands on the pages and at the top of the scripts that take settings."""
    found = [(str(block), command) for page in PAGES for block in bash_blocks(page) for command in block.commands
             if not block.is_mistake]  # fmt: skip
    for path in ROOT.glob("scripts/*.py"):
        head = re.sub(r" *\\\\\n\s*", " ", path.read_text().split('"""')[1])
        lines = [re.sub(r"(?<=\S)  +\S.*", "", line.strip()) for line in head.splitlines()]  # without explanations
        found += [(path.name, line) for line in lines if line.startswith(("python", "lockstep", "accelerate"))]
    for place, command in found:
        match = re.search(
            r"(?:lockstep |scripts/)(train|evaluate|diagnose|serve[-_]engine|serve|check[-_]environment)(?:\.py)? (.*)",
            command,
        )
        if match and not re.search(r" resume=| --rollouts| --ids| \.\.\. ", command):
            words = shlex.split(match[2], comments=True)
            if match[1] in ("check-environment", "check_environment"):
                flags, settings = parse(words)
                words = [*overrides_of(flags), *settings]
            if settings_files(words):
                continue  # tests/integration/test_page_commands.py writes the file
            words = [word for word in words if "=" in word]
            name = "locate" if " --locate" in command else match[1].replace("-", "_")
            yield f"{place} {name} {' '.join(words)}", [name, *words]


COMMANDS = dict(page_commands())
NEEDS = {"evaluate": {"trains": False}, "diagnose": {"scores": False}, "serve": {"needs_data": False}}
NEEDS |= {"serve_engine": NEEDS["serve"], "check_environment": {}, "locate": {"scores": False, "needs_data": False}}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_a_page_names_its_task(name: str) -> None:
    script, *words = COMMANDS[name]
    words = [word.replace("$lr", "1e-3") for word in words]
    config = checked(words)
    assert list(missing_problems(config, **(ALL | NEEDS.get(script, {})))) == []
    if script == "evaluate":
        assert config.heldout_sets() or config.eval.lm_eval.tasks


def test_there_are_commands_on_the_pages() -> None:
    assert len(COMMANDS) > 100
    assert {words[0] for words in COMMANDS.values()} == {"train", *NEEDS}


@pytest.mark.parametrize("file", sorted(path for path in CONFIG_DIR.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_a_command_at_the_top_of_a_file_names_its_task(file: Path) -> None:
    head = re.match(r"(#[^\n]*\n)*", file.read_text())
    assert head is not None
    text = re.sub(r"\\\n#\s*", " ", head[0])
    for line in re.findall(r"(?:scripts/train\.py) (.*)", text):
        words = [word for word in shlex.split(re.sub(r"\s+\(.*|  +\S.*", "", line)) if "=" in word]
        assert missing(*words) == [], line


def test_a_short_limit_of_the_only_answer_is_said() -> None:
    words = ["model.path=m", "data.path=d.jsonl", "reward=numeric"]
    line = "answers        at most 48 tokens (rollout.max_tokens_per_turn): longer ones are cut"
    assert line in describe_task(composed(*words), words).splitlines()
    assert "answers" not in describe_task(composed(*words), words, trains=False)
    assert "answers" not in describe_task(composed(*words, "rollout.max_tokens_per_turn=128"), words)
    assert "answers" not in describe_task(composed(*words, "environment=calculator"), words), "it has many turns"
