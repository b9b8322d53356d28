"""Mistakes of the command line get a sentence with the words to type."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.compose import schema
from lockstep.trainer.config.schema import Config
from lockstep.trainer.words import readable, refuse_unreadable

TREE = schema(Config)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["data.columns={prompt:", "task}"], "put quotes around the whole: 'data.columns={prompt: task}'"),
        (["reward.functions=[my.py:f,", "your.py:g]", "seed=1"], "'reward.functions=[my.py:f, your.py:g]'"),
        (["updates", "=", "5"], "type updates=5, without spaces"),
        (["updates", "=5"], "type updates=5, without spaces"),
        (["updates=", "5"], "type updates=5, without spaces"),
        (["--config", "my.yaml"], "a YAML file of them by its path alone; type my.yaml"),
        (["--config_file=my.yaml"], "a YAML file of them by its path alone; type my.yaml"),
        (["--updates", "5"], "settings have no dashes; type updates=5"),
        (["--optimizer.lr=1e-5"], "settings have no dashes; type optimizer.lr=1e-5"),
        (["-seed=3"], "settings have no dashes; type seed=3"),
        (["--lr", "1e-5"], "settings are typed as key=value (did you mean 'optimizer.lr'?)"),
        (["reward.functions=my.py:f"], "type 'reward.functions=[my.py:f]'"),
        (["rollout.urls=http://a:1"], "type 'rollout.urls=[http://a:1]'"),
        (["model.lora.target_modules=q_proj"], "type 'model.lora.target_modules=[q_proj]'"),
        (["reward.weights=1.0"], "type 'reward.weights=[1.0]'"),
        (["updates=[5]"], "takes one value, found the list [5]; type updates=5"),
        (["data.path=[x.jsonl, y.csv]"], "type data.sources.a.path=x.jsonl data.sources.b.path=y.csv"),
        (["data.columns={prompt=task}"], "type 'data.columns={prompt: task}'"),
        (["optimizer.lr=1e-5,"], "ends with a comma; type optimizer.lr=1e-5"),
        (["updates=1e3"], "updates is a whole number, found 1e3; type updates=1000"),
        (["updates=80.0"], "type updates=80"),
        (["run_name=a (b)"], "quote values with spaces, quotes or brackets twice"),
    ],
)
def test_a_mistake_is_answered_with_the_words_to_type(line: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        refuse_unreadable(["seed=7", *line], TREE)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        ["updates=5", "seed=1"],
        ["data.path=", "updates=5"],
        ["--cfg", "job"],
        ["--config-dir", "own", "experiment=mine"],
        ["--config-dir=own", "-m", "seed=1,2"],
        ["~reward.settings.numeric", "+environment.settings.depth=3"],
        ["data.columns={prompt: task}"],
        ["data.columns={prompt:task,answer:null}"],
        ["reward.functions=[a.py:f]"],
        ["reward.functions=${other}"],
        ["reward.weights=null", "rollout.urls=[]"],
        ["run_name='a (b)'"],
        ["optimizer.lr=1e-5", "optimizer.betas=[0.9,0.95]"],
        ["environment.settings.code='[('"],
    ],
)
def test_words_that_hydra_reads_pass(line: list[str]) -> None:
    refuse_unreadable(line, TREE)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run_name=ü1", "ü1"),
        ("run_name=läuft ü", "läuft ü"),
        ("run_name='ü1'", "ü1"),
        ("data.path=Übung 1/zahlen.jsonl", "Übung 1/zahlen.jsonl"),
        ("data.columns={prompt: Frage, answer: Lösung}", {"prompt": "Frage", "answer": "Lösung"}),
        ("data.columns={prompt:Frage,answer:Lösung}", {"prompt": "Frage", "answer": "Lösung"}),
        ("reward.functions=[Übung/belohnung.py:gut, numeric]", ["Übung/belohnung.py:gut", "numeric"]),
        ("reward.functions=['日本.py:f',numeric]", ["日本.py:f", "numeric"]),
    ],
)
def test_letters_of_any_alphabet_need_no_quotes(word: str, value: Any) -> None:
    (quoted,) = readable([word])
    refuse_unreadable([quoted], TREE)
    assert OverridesParser.create().parse_override(quoted).value() == value


def test_words_of_ascii_stay() -> None:
    words = ["updates=5", "run.yaml", "Übung.yaml", "run_name='a (b)'", "--cfg", "job"]
    assert readable(words) == words


def test_the_directory_of_a_run_is_refused_with_the_words_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/my run"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        refuse_unreadable(["runs/my run"], TREE)
    assert str(refused.value) == (
        "runs/my run is a run; type run_root=runs 'run_name=my run' resume=auto to continue it, or "
        "'model.path=runs/my run/model' for its model"
    )
    refuse_unreadable(["runs"], TREE)  # Hydra says what is wrong with it
