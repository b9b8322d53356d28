"""Composition: from groups, files and the words of a command line to a `Config`, and which of them chose the task."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.rollout.environments import declaration, make_environment
from lockstep.rollout.environments.declaration import declaration_of
from lockstep.rollout.environments.mixed import parts_of
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.plain_files import LATEST, behind_link
from lockstep.trainer.config.groups.data_settings import DataConfig, DataSetConfig
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig
from lockstep.trainer.config.hints import brief, closest
from lockstep.trainer.config.prepared import DEMO, DEMO_REWARD, data_folder
from lockstep.trainer.config.redaction import redact_text
from lockstep.trainer.config.schema import Config
from lockstep.trainer.setting import experimental, free_form

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
TASK = {
    "model": ("model", "model.path"),
    "data": ("data", "data.path", "data.sources", "data.heldout_path", "eval.sets"),
    "environment": ("environment", "environment.name"),
    "reward": ("reward", "reward.functions"),
}
"""Parts of a task, each with the words that choose it; `model` alone is a group."""
SHORT_ANSWER = 128
"""Limit of the only answer to a prompt below which it is said: a chain of thought is longer [tokens]."""


def preset_names(group: str) -> list[str]:
    """Return the file names of a config group without suffix; empty for an unknown group."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")) if group else []


def schema(config_class: type = Config) -> DictConfig:
    """Return the tree of all settings with their defaults."""
    tree = OmegaConf.structured(config_class)
    for name in free_form(config_class()):  # so that environment.settings.anything=1 needs no `+`
        OmegaConf.set_struct(OmegaConf.select(tree, name), False)
    return tree


def all_keys(tree: DictConfig, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings and sections of a tree."""
    keys: list[str] = []
    for key in tree:
        keys.append(f"{prefix}{key}")
        child = tree._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            keys += all_keys(child, f"{prefix}{key}.")
    return keys


@cache
def known_keys(config_class: type) -> frozenset[str]:
    """Return the dotted names of all settings and sections."""
    return frozenset(all_keys(schema(config_class)))


def unknown_keys(tree: DictConfig, config_class: type = Config) -> list[str]:
    """Return the keys of a tree that are no settings."""
    setting_keys, free_prefixes = known_keys(config_class), tuple(f"{name}." for name in free_form(config_class()))
    return [key for key in all_keys(tree) if key not in setting_keys and not key.startswith(free_prefixes)]


def to_config(tree: DictConfig, config_class: type = Config) -> Any:
    """Convert a composed tree. Raises `ConfigError` for keys that are no settings."""
    for key in unknown_keys(tree, config_class):  # `+key=value` gets past the schema
        hint = closest(key, sorted(known_keys(config_class)))
        raise ConfigError(f"{key} is not a setting{hint}; `--cfg job` prints all of them")
    for key in all_keys(tree):  # the link may be moved by another run, or by this one
        value = OmegaConf.select(tree, key, throw_on_missing=False)
        if isinstance(value, str) and LATEST in Path(value).parts:
            OmegaConf.update(tree, key, str(behind_link(Path(value))), force_add=True)
    config = OmegaConf.to_object(tree)
    assert isinstance(config, config_class), "a config file must start its defaults with `schema`"
    for key in free_form(config):
        entries: DictConfig = OmegaConf.select(tree, key)
        takes_one = entries._metadata.element_type in (float, str)
        for name, value in entries.items():
            if takes_one and OmegaConf.is_config(value):
                raise ConfigError(f"{key}.{name}: found {value}, expected one value; set {key}.{name}=<value>")
    if isinstance(config, Config):
        config.data.sources = _data_sets("data.sources", config.data.sources)
        config.eval.sets = _data_sets("eval.sets", config.eval.sets)
    return config


def _data_sets(setting: str, entries: dict[str, Any]) -> dict[str, DataSetConfig]:
    """Convert entries to `DataSetConfig`, without null ones. Raises `ConfigError` for other types."""
    names = [field.name for field in dataclasses.fields(DataSetConfig)]
    data_sets = {}
    for name, entry in entries.items():
        if entry is None:
            continue
        if not isinstance(entry, dict):
            raise ConfigError(f"{setting}.{name}={entry} is not a data set; set {setting}.{name}.path=<file or hub id>")
        for key in entry:
            if key not in names:
                raise ConfigError(
                    f"{setting}.{name}.{key} is not a setting{closest(str(key), names)}; set one of {', '.join(names)}"
                )
        try:
            data_sets[name] = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataSetConfig), entry))
        except OmegaConfBaseException as error:
            first, _, _ = str(error).partition("\n")
            key = getattr(error, "full_key", None) or "?"
            raise ConfigError(f"{setting}.{name}.{key}: {type_problem(first)}; leave it out for the default") from error
    return data_sets


def type_problem(text: str) -> str:
    """Return OmegaConf's message on a value of the wrong type without class names."""
    if match := re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text):
        return f"found {brief(match.group(1))}, expected {match.group(2).lower()}"
    if text.startswith("Key "):
        return "it is not a setting"
    if text.endswith("is not Optional"):
        return "found null, expected a value"
    if "ListConfig" in text:
        return "found a list in place of another type, or the reverse"
    return text


def sets(words: Sequence[str], *keys: str) -> bool:
    """Return True if a word of the command line sets one of these settings or groups, or something inside of one."""
    names = [word.lstrip("+").partition("=")[0] for word in words]
    return any(name == key or ("." in key and name.startswith(f"{key}.")) for name in names for key in keys)


def drop_prepared_heldout(data: DataConfig, words: Sequence[str]) -> str:
    """Set data.heldout_path to null if it is prepared data, and neither training data nor the command line asks for it.

    A group as data=calculator or experiment=real names both, and `data.path=...` replaces only one. Returns a sentence
    that says so; empty if nothing changed.
    """
    folder = data_folder(data.heldout_path or "")
    paths = [data_set.path for data_set in data.training_sets().values()]
    if folder is None or sets(words, "data.heldout_path") or folder in map(data_folder, paths):
        return ""
    path, data.heldout_path = data.heldout_path, None
    return (
        f"{path} is not held-out data of {', '.join(paths)}, so it is left out, as with data.heldout_path=null; set "
        "data.heldout_path=<file or hub id> to evaluate"
    )


def refuse_demo_parts(config: Config, words: Sequence[str]) -> None:
    """Raise `ConfigError` if other data was typed for the environment or the reward of a demo, and these were not.

    Also if data was typed that is not read.
    """
    if config.data.sources and sets(words, "data.path"):
        raise ConfigError(
            f"data.path={config.data.path} is not read beside data.sources; leave it out, or name it as one of them: "
            f"data.sources.more.path={config.data.path}"
        )
    data_sets = {**config.data.training_sets(), **config.heldout_sets()}.values()
    other = [data_set.path for data_set in data_sets if data_set.path and data_folder(data_set.path) != DEMO]
    if not other or not config.has_rollouts or not sets(words, *TASK["data"]):
        return
    name = config.environment.name
    is_kept = declaration(name).demo_task is not None and not sets(words, *TASK["environment"])
    parts = [f"environment {name}"] if is_kept else []
    if DEMO_REWARD in config.reward.functions and not sets(words, *TASK["reward"]):
        parts.append(f"reward {DEMO_REWARD}")
    if parts:
        raise ConfigError(
            f"{other[0]} is not data of the demo, which {' and '.join(parts)} {'are' if parts[1:] else 'is'} for; set "
            "environment=single_turn reward=numeric, or others that fit your data"
        )


def describe_task(
    config: Config, words: Sequence[str], *, from_file: Sequence[str] = (), kept: str = "", trains: bool = True
) -> str:
    """Return one line per part of the task, and a line on what an experiment or a settings file keeps beside what was
    typed.

    words: the command line. from_file: words of its settings file, and kept: what this keeps. trains: False for
    held-out data alone.
    """
    chosen_words = [*from_file, *words]
    data_sets = config.data.training_sets() if trains else config.heldout_sets()
    data = [f"{name}: {one.path}" if name else one.path for name, one in data_sets.items()]
    parts = {"model": config.model.path, "data": ", ".join(data)}
    if config.has_rollouts:
        weights = config.reward.weight_by_name.items()
        parts["environment"] = _environment(config.environment, config.max_turns)
        parts["reward"] = " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in weights)
    typed_parts = [part for part in parts if sets(chosen_words, *TASK[part])]
    kept_parts = [part for part in parts if part not in typed_parts]
    limit = config.rollout.max_tokens_per_turn
    if trains and config.has_rollouts and config.max_turns == 1 and limit < SHORT_ANSWER:
        parts["answers"] = f"at most {limit} tokens (rollout.max_tokens_per_turn): longer ones are cut"
    if trains and not config.evaluates and (heldout := [one.path for one in config.heldout_sets().values()]):
        parts["held out"] = f"{', '.join(heldout)}: not used, because eval.every=0"
    experiment = [word for word in chosen_words if word.startswith("experiment=")]
    sentences = [kept]
    if experiment and typed_parts and kept_parts:
        sentences.insert(0, f"{', '.join(kept_parts)} of {experiment[-1]}, beside another {', '.join(typed_parts)}")
    if any(sentences):
        parts["kept"] = "; ".join(filter(None, sentences))
    if uncertain := experimental(config):
        parts["experimental"] = "; ".join(f"{name}, {reason}" for name, reason in uncertain.items())
    keys = Counter(word.partition("=")[0] for word in words if "=" in word)
    if repeated_keys := [key for key, count in keys.items() if count > 1]:
        parts["typed twice"] = f"{', '.join(repeated_keys)}: the last one counts"
    return redact_text("\n".join(f"{part:<14} {text}" for part, text in parts.items()))


def _environment(settings: EnvironmentConfig, turns: int) -> str:
    environment = make_environment(settings.name, **settings.settings)
    tools = [tool["function"]["name"] for tool in getattr(environment, "tools", ())]
    suffix = f" with the tool{'s' * (len(tools) > 1)} {', '.join(tools)}" if tools else ""
    is_deterministic = all(declaration_of(part).is_deterministic for part in parts_of(environment))
    differs = "" if is_deterministic else ", whose answers may differ from run to run"
    return f"{settings.name}{suffix}, at most {turns} turn{'s' * (turns > 1)}{differs}"
