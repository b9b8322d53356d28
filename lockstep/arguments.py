"""Arguments of `lockstep.train` as the content of a settings file, with objects under the names that it holds."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.python_words import ARGUMENTS, refuse_unknown
from lockstep.rewards.signatures import adapt
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.system.user_functions import COPY, OBJECT
from lockstep.trainer.compose import preset_names
from lockstep.trainer.config.hints import brief
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.given_rows import given_rows

SHORT = {"model": "path", "data": "path", "environment": "name", "reward": "functions"}
"""Setting of a section that an argument sets which is not a dictionary of its settings."""
ROWS = re.compile(r"data\.(path|heldout_path)|(data\.sources|eval\.sets)\.[^.]+\.path")
"""Settings that take rows."""
AGENT = ("base_url", "api_key", "example")
"""Parameters of a function that runs an agent."""
PLAYS = ({"reset", "step"}, {"run"})
"""Methods of an environment."""
PLAYERS = (
    "a name, or a class with the methods reset and step (docs/environments.md), or a function that runs an agent: "
    "def agent(base_url, api_key, example)"
)


class Copies:
    """Factory of the environments of episodes: copies of an instance."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        if hasattr(instance, "declaration"):
            self.declaration = instance.declaration

    def __call__(self) -> Any:
        return copy.deepcopy(self._instance)


@dataclass
class Arguments:
    """Arguments that are being turned into settings."""

    objects: dict[str, Any] = field(default_factory=dict)
    """By the name that settings hold."""
    run_root: str = field(default_factory=lambda: Config().run_root)
    reward_prefix: str = OBJECT

    def content(self, given: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a settings file for arguments on top of those of a file. Raises `ConfigError`."""
        arguments = {name: value for name, value in given.items() if name not in SHORT or value is not None}
        tokenizer, tools = arguments.pop("tokenizer", None), arguments.pop("tools", ())
        heldout, rewards = arguments.pop("heldout", None), arguments.pop("rewards", None)
        columns = arguments.pop("columns", None)
        presets = {**{key: value for entry in file.get("defaults", ()) for key, value in entry.items()}}
        for entry in arguments.pop("defaults", ()):
            presets |= entry
        refuse_unknown({name: value for name, value in arguments.items() if name not in SHORT or _is_dictionary(value)})
        below = copy.deepcopy({key: value for key, value in file.items() if key != "defaults"})
        tree: dict[str, Any] = {}
        for name, value in arguments.items():
            section, dot, _ = name.partition(".")
            if not dot and isinstance(value, str) and value in preset_names(section):
                presets[section] = value
            elif name == "reward" and not isinstance(value, str) and not _is_dictionary(value):
                _put_rewards(tree, value)
            elif not dot and section in SHORT and not _is_dictionary(value):
                _put(tree, f"{section}.{SHORT[section]}", value)
            elif not dot and isinstance(value, str) and preset_names(section):
                presets[section] = value  # the check of presets says which there are
            else:
                _put(tree, name, value)
        if heldout is not None:
            _put_heldout(tree, heldout)
        if columns is not None:
            _put(tree, "data.columns", columns)
        if rewards is not None:
            _put_rewards(tree, rewards)
        if inspect.isroutine(player := _environment_of(tree)):
            _put_agent(tree, player)
        if tools:
            _put(tree, "environment.settings.files", _tools(tools))
            if "environment" not in presets and "name" not in {**below.get("environment", {}), **tree["environment"]}:
                presets["environment"] = "tools"
        self.run_root = str(tree.get("run_root") or below.get("run_root") or self.run_root)
        rewards_at = [one["reward"] for one in (below, tree) if isinstance(one.get("reward"), Mapping)]
        if [one["isolation"] for one in rewards_at if "isolation" in one][-1:] == ["process"]:
            self.reward_prefix = COPY
        model = tree.get("model", {}).get("path") if isinstance(tree.get("model"), Mapping) else None
        if model is not None and not isinstance(model, str | Path):
            images = {**_images_of(below), **_images_of(tree)}
            sees_images = images.get("max_per_prompt", 0) != 0
            tree["model"]["path"] = stored_model(model, tokenizer, Path(self.run_root), sees_images=sees_images)
        elif tokenizer is not None:
            raise ConfigError("tokenizer: found one without a loaded model, whose folder would have it; leave it out")
        for name, value in self._plain("", tree).items():  # texts of the file may refer to other settings
            _put(below, name, value)
        return {**({"defaults": [{name: value} for name, value in presets.items()]} if presets else {}), **below}

    def _plain(self, name: str, value: Any) -> Any:
        """Return a value as a settings file would hold it."""
        if _is_dictionary(value):
            return {str(key): self._plain(f"{name}.{key}".lstrip("."), item) for key, item in value.items()}
        if isinstance(value, str | Path):
            return str(value).replace("${", "\\${")  # a text of Python refers to nothing
        if value is not None and ROWS.fullmatch(name):
            return self._rows(name, value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, list | tuple):
            return [self._plain(name, item) for item in value]
        if name == "environment.name" and not callable(value):
            return self._environment(value)
        if callable(value):
            prefix = self.reward_prefix if name == "reward.functions" else OBJECT
            return f"{prefix}{self._keep(value)}"
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            return value.item()  # a scalar of NumPy or torch
        raise ConfigError(f"{name}: found {type(value).__name__}, expected a value, a function or a class")

    def _rows(self, name: str, value: Any) -> str:
        of = name.removesuffix(".path").replace(".", "-")
        try:
            key, rows = given_rows(value, of=of, say=print)
        except DataError as error:
            argument = re.sub(r"^eval\.sets\.(.+)\.path$", r"heldout['\1']", ARGUMENTS.get(name, name))
            raise DataError(str(error).replace(of, argument, 1)) from error
        self.objects[key] = rows
        return f"{OBJECT}{key}"

    def _environment(self, instance: Any) -> str:
        kind = type(instance).__name__
        if not any(methods <= set(dir(instance)) for methods in PLAYS):
            raise ConfigError(f"environment: found {kind}, expected {PLAYERS}")
        try:
            copy.deepcopy(instance)
        except Exception as error:  # of the instance's own methods
            raise ConfigError(
                f"environment: each episode plays a copy of the {kind}, which cannot be copied: {error}; pass the class"
            ) from error
        return f"{OBJECT}{self._keep(Copies(instance), kind)}"

    def _keep(self, value: Callable[..., Any], name: str | None = None) -> str:
        """Keep an object under its own name, or one with a number if another has it."""
        function = value.func if isinstance(value, functools.partial) else value
        own = name or str(getattr(function, "__name__", type(function).__name__)).strip("<>")
        names = (own, *(f"{own}_{number}" for number in range(2, 1000)))
        free = next(one for one in names if self.objects.get(one, value) is value)
        self.objects[free] = value
        return free


def _is_dictionary(value: Any) -> bool:
    """Return True for a dictionary of settings; False also for the splits of `datasets`, which is refused as rows."""
    return isinstance(value, Mapping) and not hasattr(value, "column_names")


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting by its dotted name; dictionaries are merged."""
    *sections, last = name.split(".")
    for section in sections:
        if not isinstance(tree.setdefault(section, {}), dict):
            raise ConfigError(f"{name}: found {section}={tree[section]} beside it, expected a dictionary of settings")
        tree = tree[section]
    if _is_dictionary(value) and isinstance(tree.get(last), dict):
        for key, item in value.items():
            _put(tree[last], str(key), item)
    else:
        tree[last] = dict(value) if _is_dictionary(value) else value


def _put_heldout(tree: dict[str, Any], heldout: Any) -> None:
    if not _is_dictionary(heldout):
        _put(tree, "data.heldout_path", heldout)
        return
    for name, rows in heldout.items():
        _put(tree, f"eval.sets.{name}.path", rows)


def _images_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of images in a tree of settings."""
    section = tree.get("model")
    images = section.get("images") if isinstance(section, Mapping) else None
    return images if isinstance(images, Mapping) else {}


def _environment_of(tree: Mapping[str, Any]) -> Any:
    section = tree.get("environment")
    return section.get("name") if isinstance(section, Mapping) else None


def _put_agent(tree: dict[str, Any], function: Callable[..., Any]) -> None:
    """Set the environment `agent` of a function. Raises `ConfigError` for a function with other parameters."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    try:
        signature.bind(*AGENT)
    except TypeError:
        names = []
    if tuple(names[: len(AGENT)]) != AGENT:
        definition = f"{getattr(function, '__name__', 'function')}{signature}"
        raise ConfigError(f"environment: found the function {brief(definition)}, expected {PLAYERS}")
    tree["environment"]["name"] = "agent"
    _put(tree, "environment.settings.agent", function)


def _tools(tools: Any) -> list[Any]:
    """Return one tool or several as a list. Raises `ConfigError` for what is neither a function nor `file.py:name`."""
    functions = list(tools) if isinstance(tools, Sequence) and not isinstance(tools, str) else [tools]
    for one in functions:
        if not callable(one) and not isinstance(one, str):
            raise ConfigError(f"tools: found {type(one).__name__}, expected functions; write tools=[my_function]")
    return functions


def _put_rewards(tree: dict[str, Any], rewards: Any) -> None:
    weights = list(rewards.values()) if isinstance(rewards, Mapping) else None
    functions = list(rewards) if isinstance(rewards, Mapping | Sequence) and not isinstance(rewards, str) else [rewards]
    for weight in weights or ():
        if isinstance(weight, str) or callable(weight):
            raise ConfigError(
                f"rewards: found {brief(getattr(weight, '__name__', weight))} as a weight: the dictionary goes from "
                "function to weight; write rewards={my_function: 1.0}"
            )
    for one in functions:
        if callable(one) and sum(other is one for other in functions) > 1:
            raise ConfigError(f"rewards: found {getattr(one, '__name__', one)} twice, expected each once")
    _put(tree, "reward.functions", functions)
    if weights:
        _put(tree, "reward.weights", weights)


def refuse_no_reward(name: str, function: Any, settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a function that no signature of a reward fits, or that returns nothing.

    Classes and other objects are made when the run starts.
    """
    if inspect.isbuiltin(function):
        raise ConfigError(f"rewards: found the built-in function {name}, expected one of yours: def mine(rollout)")
    if not inspect.isfunction(function):
        return
    own = settings.get(name, {})
    adapt(name, function, own if isinstance(own, Mapping) else {})
    if _returns_nothing(function):
        raise ConfigError(f"reward {name} has no `return` with a value, so no rollout would have a reward; write one")


def _returns_nothing(function: Callable[..., Any]) -> bool:
    """Return True for a `def` whose text shows that it returns None whenever it returns."""
    if hasattr(function, "__wrapped__"):
        return False
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):  # typed into an interpreter, or a part of an expression
        return False
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    nodes: list[ast.AST] = list(definition.body)
    if isinstance(nodes[-1], ast.Raise | ast.While):
        return False
    for node in nodes:  # grows, without the functions inside
        if isinstance(node, ast.Yield | ast.YieldFrom) or (isinstance(node, ast.Return) and node.value is not None):
            return False
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            nodes += ast.iter_child_nodes(node)
    return True


def stored_model(model: Any, tokenizer: Any, run_root: Path, *, sees_images: bool = False) -> str:
    """Write a loaded model and its tokenizer below `run_root`, under the hash of the files, and return the path.

    tokenizer: the processor of a model that sees images, which has the tokenizer in it.

    Engine, checkpoints and evaluations read it from there. Raises `ConfigError` for other values.
    """
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise ConfigError(f"model: found {type(model).__name__}, expected a path, or a model of transformers")
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "model: found one with adapters of peft; pass model={'path': <its base model>, 'lora': {'rank': 16}} for "
            "new ones, or 'adapters': {'<name>': '<their folder>'} for saved ones"
        )
    if sees_images and not (hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer")):
        raise ConfigError(
            f"tokenizer: found {type(tokenizer).__name__}, and model.images.max_per_prompt wants the processor of the "
            "model, which has tokenizer and image processor; pass "
            "tokenizer=transformers.AutoProcessor.from_pretrained(<where the model is from>)"
        )
    if tokenizer is None:
        raise ConfigError("model: found a loaded one without its tokenizer; pass tokenizer=<it>, too")
    folder = run_root / ".models"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder, prefix="unfinished-"))
    try:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        digest = hashlib.sha256()
        for file in sorted(unfinished.iterdir()):
            with file.open("rb") as content:
                digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        place = folder / f"{type(model).__name__}-{digest.hexdigest()[:12]}"
        if not place.exists():
            unfinished.rename(place)
            size = sum(file.stat().st_size for file in place.iterdir())
            print(f"the loaded model is trained from its copy in {place} ({size / 2**30:.2f} GiB); it stays as it is")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return str(place)
