"""Arguments of `lockstep.train` as settings: objects get names, and what cannot be trained on is refused at once."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import lockstep
from lockstep.arguments import Arguments
from lockstep.rewards.resolve import compares_groups, resolve
from lockstep.rewards.workers.copies import pickled
from lockstep.rollout.environments import declaration, make_environment
from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.system.user_functions import file_sha256, keep, load_functions, object_named
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.datasets import load_rows
from lockstep.trainer.objective.own.lookup import policy_loss_named
from tests.fixtures.models import save_tiny_model
from tests.fixtures.paths import ROOT
from tests.fixtures.vision import save_tiny

ROWS = [{"question": f"compute {number}+1", "answer": str(number + 1)} for number in range(8)]


def right(rollout: Any) -> float:
    return float(rollout.answer == rollout.example["answer"])


def best_of(rollouts: Any) -> list[float]:
    return [1.0 for _ in rollouts]


def search(query: str) -> str:
    """Search.

    Args:
        query: the words
    """
    return query


class Game:
    """An environment of one turn."""

    declaration = Declaration(reads="prompt", max_turns=5)
    tools = ()

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth

    async def reset(self, example: Any) -> Any:
        return [{"role": "user", "content": example["question"]}]

    async def step(self, message: Any) -> Any: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, tied=False)
    return path


@pytest.fixture
def configured(model: Path) -> Any:
    """Function that configures a run on rows of this process, with the arguments that a test adds."""
    return lambda *file, **arguments: lockstep.configure(
        *file, **{"model": model, "data": ROWS, "rewards": [right], "environment": "single_turn", **arguments}
    )


def content(**arguments: Any) -> dict[str, Any]:
    return Arguments().content(arguments, {})


def test_keywords_are_the_content_of_a_settings_file(configured: Any) -> None:
    config = configured(
        algorithm="dr_grpo", updates=3, optimizer={"lr": np.float32(0.5)}, **{"rollout.prompts_per_step": 4}
    )
    assert isinstance(config, Config)
    assert config.algorithm.name == "dr_grpo"
    assert (config.updates, config.optimizer.lr, config.rollout.prompts_per_step) == (3, 0.5, 4)
    both = configured(defaults=[{"algorithm": "dr_grpo"}], algorithm={"clip_high": 0.5})
    assert (both.algorithm.name, both.algorithm.clip_high) == ("dr_grpo", 0.5)


def test_arguments_go_on_top_of_a_settings_file(configured: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [{algorithm: dr_grpo}]\nupdates: ${seed}\noptimizer: {lr: 0.25, warmup_updates: 2}\n")
    config = configured(file, optimizer={"lr": 0.5}, seed=3)
    assert (config.algorithm.name, config.updates) == ("dr_grpo", 3)
    assert (config.optimizer.lr, config.optimizer.warmup_updates) == (0.5, 2)
    with pytest.raises(ConfigError, match=r"found 'mine.json', expected the path of a settings file"):
        lockstep.configure("mine.json")


def test_a_text_means_itself(configured: Any) -> None:
    text = "pay ${5} to 'x', ${seed}\n# {a: 1}"
    config = configured(data={"path": ROWS, "system_prompt": text})
    assert config.data.system_prompt == text


def rows_of(count: int = 8) -> Iterator[dict[str, Any]]:
    yield from ROWS[:count]


@pytest.mark.parametrize("kind", ["list", "generator", "function", "tuple"])
def test_rows_are_read_as_from_a_file(kind: str, configured: Any) -> None:
    values: Any = {"list": ROWS, "generator": rows_of(), "function": rows_of, "tuple": tuple(ROWS)}[kind]
    config = configured(data=values)
    assert list(load_rows(config.data.path, "train")) == ROWS


def test_the_name_of_rows_follows_their_content_alone(configured: Any, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "table")
    again = datasets.concatenate_datasets(
        [datasets.Dataset.from_list(ROWS[:3]), datasets.load_from_disk(str(tmp_path / "table")).select(range(3, 8))]
    )
    names = {configured(data=one).data.path for one in (table, again, table.select(range(8)))}
    assert len(names) == 1
    assert configured(data=table.select([1, 0, 2, 3, 4, 5, 6, 7])).data.path not in names
    other = [{**ROWS[0], "answer": "2"}, *ROWS[1:]]
    lists = [configured(data=one).data.path for one in (ROWS, [dict(row) for row in ROWS], ROWS[1:], other)]
    assert lists[0] == lists[1]
    assert len(set(lists)) == 3


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "found no rows"),
        ([{"question": "a", 1: "b"}], "row 0: found the key 1 of type int"),
        ([{"question": "a", "c": [{"d": {2: 1}}]}], "found the key 2"),
        ([*ROWS, {"question": {1, 2}}], "row 8: found a value of type set, which JSON does not have; convert it"),
        ([["a"]], "expected a JSON object per row"),
        ({"train": ROWS}, "train is not a setting"),
        ([{"question": "a", "day": datetime.date(2026, 1, 1)}], "row 0: found a value of type date, which JSON does"),
        (5, "found int, expected a path"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), r"pass <it>\['train'\]"),
        ([{"text": "a"}], "no prompt in a data row"),
    ],
)
def test_what_no_file_could_hold_is_refused(rows: Any, words: str, configured: Any) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        configured(data=rows)


def test_values_of_numpy_in_rows_are_numbers(configured: Any) -> None:
    row = {"question": "a", "count": np.int64(3), "is_hard": np.bool_(True), "shares": np.array([0.5, 1.0])}
    assert list(load_rows(configured(data=[row]).data.path, "train")) == [
        {"question": "a", "count": 3, "is_hard": True, "shares": [0.5, 1.0]}
    ]


def test_no_rows_are_named_by_the_argument(configured: Any) -> None:
    with pytest.raises(DataError, match=r"^heldout: found no rows"):
        configured(heldout=[])
    with pytest.raises(DataError, match=r"^heldout\['hard'\]: found no rows"):
        configured(heldout={"hard": []})


def test_columns_are_an_argument(configured: Any) -> None:
    rows = [{"task": row["question"], "answer": row["answer"]} for row in ROWS]
    assert configured(data=rows, columns={"prompt": "task"}).data.columns == {"prompt": "task"}
    with pytest.raises(ConfigError, match=r'set columns=\{"prompt": "task"\} with the column'):
        configured(data=[{"task": "a"}])


def test_heldout_rows_are_one_set_or_several(configured: Any) -> None:
    one = configured(heldout=ROWS[:2])
    assert [len(load_rows(data_set.path, "test")) for data_set in one.heldout_sets().values()] == [2]
    several = configured(heldout={"easy": ROWS[:2], "hard": ROWS[2:]}).heldout_sets()
    assert {name: len(load_rows(data_set.path, "test")) for name, data_set in several.items()} == {"easy": 2, "hard": 6}


def test_rewards_are_functions_and_names_with_weights(configured: Any) -> None:
    assert configured(rewards=right).reward.functions == ["object:right"]
    assert configured(rewards="numeric").reward.functions == ["numeric"]
    config = configured(rewards={right: 0.5, "numeric": 1.0})
    assert config.reward.weight_by_name == {"right": 0.5, "numeric": 1.0}
    assert not config.reward.uses_workers
    functions = configured(rewards=[lambda rollout: 1.0, lambda rollout: 2.0]).reward.functions
    assert functions == ["object:lambda", "object:lambda_2"]
    assert compares_groups(configured(rewards=[best_of]).reward.functions[0])


def takes_nothing() -> float:
    return 1.0


def forgets(rollout: Any) -> None:
    """Has a value inside, and returns none."""

    def inner() -> float:
        return 1.0

    rollout.answer = inner()


def stops(rollout: Any) -> float:
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (
            {"a": right},
            r"found right as a weight: the dictionary goes from function to weight; write rewards=\{my_func",
        ),
        ([right, right], "rewards: found right twice"),
        (print, "found the built-in function print"),
        (len, "found the built-in function len"),
        (
            takes_nothing,
            r"the signature takes_nothing\(\) -> 'float'|the signature takes_nothing\(\) is none of a reward",
        ),
        (forgets, "reward forgets has no `return` with a value"),
    ],
)
def test_what_cannot_reward_is_refused(rewards: Any, words: str, configured: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(rewards=rewards)


def test_a_reward_may_raise_and_be_a_part_of_an_expression(configured: Any) -> None:
    assert configured(rewards=[stops]).reward.functions == ["object:stops"]
    assert configured(reward=right).reward.functions == ["object:right"]


def test_a_cell_that_runs_again_has_its_new_functions(configured: Any) -> None:
    def score(rollout: Any) -> float:
        return 1.0

    first = configured(rewards=[score]).reward.functions

    def score(rollout: Any) -> float:  # type: ignore[no-redef]
        return 2.0

    assert configured(rewards=[score]).reward.functions == first
    assert object_named(first[0])(None) == 2.0


def test_functions_go_to_workers_as_copies_if_they_can(configured: Any) -> None:
    config = configured(reward={"isolation": "process"})
    assert config.reward.functions == ["copy:right"]
    assert config.reward.uses_workers
    assert pickled("copy:right").keys() == {"pickle"}
    guard = threading.Lock()

    def locked(rollout: Any) -> float:
        with guard:
            return 1.0

    with pytest.raises(ConfigError, match=r"locked cannot be copied .* because of the variable guard \(lock\)"):
        configured(rewards=[locked], reward={"isolation": "process"})


def test_tools_and_environments_are_found_by_their_names(configured: Any) -> None:
    config = configured(environment={"settings": {}}, tools=[search])
    assert config.environment.name == "tools"
    environment: Any = make_environment(config.environment.name, **config.environment.settings)
    assert [tool["function"]["name"] for tool in environment.tools] == ["search"]

    config = configured(environment={"name": Game, "settings": {"depth": 3}})
    assert config.max_turns == 5
    assert make_environment(config.environment.name, **config.environment.settings).depth == 3

    instance = Game(7)
    name = configured(environment=instance).environment.name
    first, second = make_environment(name), make_environment(name)
    assert first.depth == second.depth == 7
    assert len({id(one) for one in (first, second, instance)}) == 3
    assert declaration(name).max_turns == 5


def agent(base_url: str, api_key: str, example: Any) -> Any:
    return {}


def test_a_function_is_taken_as_an_agent(configured: Any) -> None:
    for given in (agent, {"name": agent, "max_turns": 3}):
        config = configured(environment=given)
        assert config.environment.name == "agent"
        made: Any = make_environment("agent", **config.environment.settings)
        assert made.function is agent
    with pytest.raises(
        ConfigError, match=r"found the function rows_of\(count: 'int' = 8\).*def agent\(base_url, api_k"
    ):
        configured(environment=rows_of)


def test_one_tool_needs_no_list(configured: Any) -> None:
    settings = configured(environment={"settings": {}}, tools=search).environment.settings
    assert settings == {"files": ["object:search"]}
    with pytest.raises(ConfigError, match="tools: found int, expected functions"):
        configured(tools=[search, 3])


def test_an_instance_that_cannot_be_copied_is_refused(configured: Any) -> None:
    instance = Game()
    instance.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="each episode plays a copy of the Game, which cannot be copied"):
        configured(environment=instance)
    with pytest.raises(ConfigError, match="environment: found object, expected a name, or a class"):
        configured(environment=object())


def test_an_object_that_is_not_there_is_an_error_of_the_settings() -> None:
    with pytest.raises(ConfigError, match="continue the run in that program"):
        load_functions("object:gone")


def test_a_loss_is_recorded_with_its_source(configured: Any) -> None:
    def mine(inputs: Any) -> Any:
        return -inputs.ratio * inputs.advantages

    config = configured(algorithm={"loss": mine})
    assert config.algorithm.loss == "object:mine"
    assert policy_loss_named(config.algorithm.loss).function is not None
    from lockstep.trainer.config.user_code import hashes

    assert len(hashes(config.algorithm)["loss_sha256"]) == 64


def test_a_function_without_a_source_has_a_hash() -> None:
    names: dict[str, Any] = {}
    exec("def first(x): return x + 1\ndef second(x): return x - 1", names)
    keep(names)
    assert file_sha256("object:first") != file_sha256("object:second")


def test_a_loaded_model_is_written_once(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    given = {"model": loaded, "tokenizer": tokenizer, "run_root": tmp_path}
    place = Path(content(**given)["model"]["path"])
    assert place.parent == tmp_path / ".models"
    assert (place / "model.safetensors").is_file()
    assert (place / "tokenizer.json").is_file()
    assert "it stays as it is" in capsys.readouterr().out
    assert content(**given)["model"]["path"] == str(place)
    assert capsys.readouterr().out == ""
    assert [path.name for path in (tmp_path / ".models").iterdir()] == [place.name]
    loaded.lm_head.weight.data += 1
    assert content(**given)["model"]["path"] != str(place)


def test_a_loaded_model_that_sees_images_is_written_with_its_processor(tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

    path = save_tiny("qwen2_5_vl", tmp_path / "model")
    loaded, processor = AutoModelForImageTextToText.from_pretrained(path), AutoProcessor.from_pretrained(path)
    given = {"model": {"path": loaded, "images": {"max_per_prompt": 1}}, "run_root": tmp_path}
    place = content(**given, tokenizer=processor)["model"]["path"]
    assert AutoImageProcessor.from_pretrained(place).to_dict() == processor.image_processor.to_dict()
    assert (Path(place) / "tokenizer.json").is_file()
    assert (Path(place) / "chat_template.jinja").is_file()
    for other in (processor.tokenizer, processor.image_processor, None):
        with pytest.raises(ConfigError, match=r"pass tokenizer=transformers.AutoProcessor.from_pretrained\(<where"):
            content(**given, tokenizer=other)
    with pytest.raises(ConfigError, match="wants the processor"):
        content(model=loaded, tokenizer=processor.tokenizer, run_root=tmp_path, **{"model.images.max_per_prompt": 1})
    assert content(model=loaded, tokenizer=processor.tokenizer, run_root=tmp_path), "it may also train on texts"


def test_a_model_that_cannot_be_written_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="expected a path, or a model of transformers"):
        content(model=object())
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(ConfigError, match="pass tokenizer="):
        content(model=loaded)
    loaded.peft_config = {}
    with pytest.raises(ConfigError, match="adapters of peft"):
        content(model=loaded, tokenizer=object())
    with pytest.raises(ConfigError, match="tokenizer: found one without a loaded model"):
        content(model="somewhere", tokenizer=object())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizr": {"lr": 1}}, "optimizr is not a setting"),
        ({"optimizer": {"lrr": 1}}, r"optimizer.lrr is not a setting \(did you mean 'optimizer.lr'"),
        ({"algorithm": "dapoo"}, "algorithm: dapoo does not exist"),
        ({"updates": "many"}, "updates: found many, expected integer"),
        ({"rewards": "numerik"}, "did you mean 'numeric'"),
        ({"rewards": ["object:gone"]}, "found object:gone, an object of the program that called lockstep.train"),
        ({"data": "object:gone"}, "found object:gone"),
        ({"seed": object()}, "seed: found object, expected a value"),
        ({"environment": "chess"}, "chess"),
    ],
)
def test_mistakes_are_one_sentence(arguments: dict[str, Any], words: str, configured: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        configured(**arguments)


def test_a_callback_with_other_parameters_is_refused(configured: Any) -> None:
    with pytest.raises(ConfigError, match=r"on_step: found takes_nothing\(\).*, expected def takes_nothing\(report\)"):
        lockstep.train(configured(), on_step=takes_nothing)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_evaluation: found int, expected a function"):
        lockstep.train(configured(), on_evaluation=3)  # type: ignore[arg-type]


def test_rollouts_that_are_not_there_are_said(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    run = lockstep.Run(tmp_path)
    with pytest.raises(DataError, match="no rollouts of update 99; it has those of none; logger="):
        run.rollouts(99)
    (tmp_path / "rollouts").mkdir()
    for update in (1, 10, 2):
        (tmp_path / f"rollouts/step-{update:06d}.jsonl").touch()
    with pytest.raises(DataError, match="no rollouts of update 99; it has those of 1, 2, 10"):
        run.rollouts(99)


def test_an_interrupt_of_the_start_is_one_sentence(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.trainer.run.run.run", interrupted)
    with pytest.raises(KeyboardInterrupt, match="ended at once, because it had no update to finish"):
        lockstep.train(configured())


def test_a_config_is_trained_as_it_is(configured: Any) -> None:
    config = configured()
    with pytest.raises(ConfigError, match=r"found a Config and data, updates; give them to lockstep\.configure"):
        lockstep.train(config, data=ROWS, updates=3)
    config.dry_run = True
    with pytest.raises(ConfigError, match="found dry_run=True"):
        lockstep.train(config)


def test_an_object_of_a_reward_is_called_like_a_function_of_a_file() -> None:
    keep({"right": right})
    assert resolve("object:right", {}).scope == resolve(f"{ROOT}/tests/unit/api/test_arguments.py:right", {}).scope
