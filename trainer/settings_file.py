"""A settings file of the user's own: read from the command line, checked, and put on top of the presets.

Lockstep reads the file and stores its content for Hydra, so that any name and folder works and none can collide with
those under configs/. Words of the command line go on top.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.user_functions import names_function
from lockstep.trainer.command_line import SUFFIXES, settings_files, typed_words, without_file
from lockstep.trainer.compose import CONFIG_DIR, describe_task, known_keys, preset_names, schema, sets, type_problem
from lockstep.trainer.config.changes import leaves
from lockstep.trainer.config.groups.data_settings import SAVED_ROLLOUTS
from lockstep.trainer.config.groups.other_names import MIGRATING, closest_name, replacement
from lockstep.trainer.config.hints import brief, closest
from lockstep.trainer.config.redaction import REDACTED, override_value
from lockstep.trainer.config.schema import Config
from lockstep.trainer.setting import declarations

DATA_SETS = ("data.sources.", "eval.sets.")
"""Beginnings of the names of data sets that the user names: their `path` is one."""
OWN = {"environment": "name", "reward": "functions", "model": "path", "data": "path"}
"""Setting of a group that takes what is not the name of a preset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """The content of a settings file."""

    path: Path
    presets: Mapping[str, Any]
    """Option by group, from its `defaults`."""
    values: Mapping[str, Any]
    """Nested settings; paths to what exists beside the file lead there."""

    @property
    def words(self) -> list[str]:
        """The content as words of a command line."""
        presets = [f"{group}={override_value(option)}" for group, option in self.presets.items()]
        return [*presets, *(f"{key}={override_value(value)}" for key, value in leaves(self.values))]

    def store(self, base: str) -> str:
        """Store a configuration for Hydra that begins with the one named `base`; return its name."""
        presets = [{f"override /{group}": option} for group, option in self.presets.items()]
        ConfigStore.instance().store(name="settings_file", node={"defaults": [base, *presets, "_self_"], **self.values})
        return "settings_file"

    def kept_beside(self, words: Sequence[str]) -> str:
        """Return the values of the file that a preset on the command line would change; empty if there are none."""
        own, sentences = {**self.presets, **dict(leaves(self.values))}, []
        for word in words:
            preset = _preset(*word.split("=", 1)) if "=" in word else {}
            names = [key for key, value in preset.items() if key in own and own[key] != value and not sets(words, key)]
            if names:
                values = ", ".join(f"{key}={override_value(own[key])}" for key in names)
                sentences.append(f"{values} of {self.path}, beside {word}")
        return "; ".join(sentences)


def settings_file(words: Sequence[str], config_class: type = Config, *, base: str = "train") -> SettingsFile | None:
    """Return the settings file that a command line names; None if it names none.

    A file is read once by a process, because a run may outlive it. base: file under configs/ that it is put on.
    Raises `ConfigError`.
    """
    files = settings_files(words)
    if not files:
        return None
    if files[1:]:
        raise ConfigError(
            f"found two settings files, {files[0]} and {files[1]}, expected one; put the settings of both into one, or "
            "type those of the second as key=value"
        )
    for word in words:
        if word.partition("=")[0] in ("--config-name", "-cn", "--config-path", "-cp"):
            raise ConfigError(f"{word} takes the place of configs/{base}.yaml, which {files[0]} needs; leave it out")
    has_own_presets = any(word.partition("=")[0] in ("--config-dir", "-cd") for word in words)
    return _read(files[0], config_class, base, has_own_presets)


def with_file(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the content of its settings file in place of its name."""
    file = settings_file(words)
    return list(words) if file is None else [*file.words, *without_file(words)]


def describe_command(config: Config, *, trains: bool = True) -> str:
    """Return the lines of `describe_task` for the command line of this process."""
    words = typed_words()
    file = settings_file(words)
    if file is None:
        return describe_task(config, words, trains=trains)
    return describe_task(config, words, from_file=file.words, kept=file.kept_beside(words), trains=trains)


def fit(values: Mapping[str, Any], path: Path, config_class: type = Config) -> DictConfig:
    """Return the schema with the values of a file. Raises `ConfigError` for a value of the wrong type."""
    try:
        merged = OmegaConf.merge(schema(config_class), values)
    except OmegaConfBaseException as error:
        first, _, _ = str(error).partition("\n")
        key = getattr(error, "full_key", None) or "a value"
        raise ConfigError(f"{path} cannot be read as settings: {key}: {type_problem(first)}") from error
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _read(name: str, config_class: type, base: str, has_own_presets: bool) -> SettingsFile:
    path = Path(name)
    return of_content(_parsed(path), path, config_class, base, checks_options=not has_own_presets)


def of_content(
    content: dict[str, Any],
    path: Path,
    config_class: type = Config,
    base: str = "train",
    *,
    checks_options: bool = True,
) -> SettingsFile:
    """Return the content of a settings file at a path. Raises `ConfigError` with one sentence for the first mistake."""
    groups, place = _groups(base), f"{path}: defaults: "
    try:
        presets = _presets(content.pop("defaults", None), groups, checks_options=checks_options)
        place = f"{path}: "
        _refuse_misspelled(content, schema(config_class), groups, known_keys(config_class))
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None
    settings = declarations(config_class())
    paths = tuple(f"{setting}." for setting, (declaration, _) in settings.items() if declaration.is_path)

    def placed(setting: str, text: str) -> str:
        if "${hydra:" in text or REDACTED in text:  # Hydra is not there when the run begins; a run's config.yaml
            raise ConfigError(f"{path}: {setting}: found {text}, expected a value; write the value itself")
        of_data = setting.startswith(DATA_SETS) and setting.endswith(".path")
        is_path = of_data or f"{setting}.".startswith(paths)
        return _beside(path.parent, text, is_path=is_path)

    values = _with_texts("", content, placed)
    fit(values, path, config_class)
    for name, (declaration, _) in settings.items():
        if declaration.example:
            _drop_empty(values, name.split("."))
    return SettingsFile(path=path, presets=presets, values=values)


def _parsed(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, expected a YAML file of settings; name the file in it")
    if not path.is_file():
        others = [str(other) for suffix in SUFFIXES for other in path.parent.glob(f"*{suffix}")]
        raise ConfigError(f"there is no settings file {path}{closest(str(path), others)}; type the path of one")
    try:
        text = path.read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = OmegaConf.create(text) if isinstance(root, yaml.MappingNode) else root
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; expected a text file in UTF-8") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}{_yaml_problem(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, DictConfig):
        shape = "a list" if isinstance(content, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{path}: found {shape}, expected settings by name; write them as optimizer: {{lr: 1e-6}}")
    values: Any = OmegaConf.to_container(content)
    return values


def _yaml_problem(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    line = f", line {mark.line + 1}" if mark else ""
    if problem.startswith("found duplicate key"):
        return f"{line}: {problem.split()[3]} is set twice, expected once; delete one of the two"
    advice = "indent with spaces, not with tabs" if "'\\t'" in problem else "put texts with : # { or $ into quotes"
    return f"{line}: {problem}; expected YAML: {advice}"


def _groups(base: str) -> list[str]:
    """Return the groups of presets of a file under configs/."""
    defaults = yaml.safe_load((CONFIG_DIR / f"{base}.yaml").read_text(encoding="utf-8"))["defaults"]
    return [name for entry in defaults if isinstance(entry, dict) for name in entry if not name.startswith("override")]


def _group(name: str) -> str:
    """Return the group of an entry of `defaults`, which may be written as Hydra wants it: `override /algorithm`."""
    return name.removeprefix("override ").strip().lstrip("/")


def _presets(entries: Any, groups: Sequence[str], *, checks_options: bool) -> dict[str, Any]:
    presets: dict[str, Any] = {}
    if not isinstance(entries, list | None):
        raise ConfigError(f"found {entries}, expected a list; write defaults: [{{algorithm: ppo}}]")
    for entry in entries or []:
        if entry in ("_self_", "schema", "train"):
            continue  # always there
        if not isinstance(entry, dict):
            raise ConfigError(f"found {entry}, expected groups with a preset; write defaults: [{{algorithm: ppo}}]")
        for name, value in entry.items():
            group, option = _group(str(name)), "off" if value is False else value  # YAML reads off as false
            if group not in groups:
                choices = ", ".join(groups)
                raise ConfigError(f"{group} is not a group{closest(group, groups)}; expected one of: {choices}")
            options = preset_names(group)
            if checks_options and option is not None and option not in options:
                hint, choices, own = closest(str(option), options), ", ".join(options), _own(group, option)
                problem = f"{group}: {option} does not exist{hint}; expected one of: {choices}"
                raise ConfigError(f"{problem}; for your own, write {own}" if own else problem)
            if group in presets:
                raise ConfigError(f"found {group} twice, expected once; delete one of the two")
            presets[group] = option
    return presets


def _refuse_misspelled(
    values: Mapping[Any, Any], tree: DictConfig, groups: Sequence[str], known: Collection[str], prefix: str = ""
) -> None:
    """Raise `ConfigError` for the first key that is not a setting, or whose value has another shape."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        default: Any = tree._get_node(str(key)) if str(key) in tree else None
        is_section = isinstance(default, DictConfig) and OmegaConf.get_type(default) is not dict
        if name in groups and value is not None and not isinstance(value, Mapping):
            spelling = _own(name, value) or f"defaults: [{{{name}: {brief(override_value(value))}}}], if it is a preset"
            raise ConfigError(f"{name}: found {brief(value)}, expected settings; write {spelling}")
        if default is None:
            raise ConfigError(_unknown(name, value, known))
        if is_section and isinstance(value, Mapping):
            _refuse_misspelled(value, default, groups, known, f"{name}.")
        elif is_section:
            content = "nothing" if value is None else brief(value)
            raise ConfigError(
                f"{name}: found {content}, expected settings; indent them below {name}:, for example "
                f"{next(iter(default))}: ..., or leave {name} out"
            )
        elif isinstance(default, ListConfig) and isinstance(value, str) and not value.startswith("$"):
            raise ConfigError(f"{name}: found {brief(value)}, expected a list; write {_nested(name, [value])}")
        elif isinstance(value, bool) and isinstance(tree[key], str):
            raise ConfigError(f"{name}: found {str(value).lower()}, as YAML reads off, no, on, yes; write it in quotes")


def _own(group: str, value: Any) -> str:
    """Return how to write a path or an id, which no preset has as its name; empty for another value."""
    if group not in OWN or not re.search("[./:]", str(value)):
        return ""
    return _nested(f"{group}.{OWN[group]}", [value] if group == "reward" else value)


def _unknown(name: str, value: Any, known: Collection[str]) -> str:
    if name in known:
        return f"{name} has dots, expected nested settings; write {_nested(name, value)}"
    names = sorted(known)
    meant = closest_name(name, names)
    if replacement(name, names):
        step = MIGRATING
    else:
        step = f"write {_nested(meant, value)}" if meant else "`--cfg job` prints all of them"
    return f"{name} is not a setting{closest(name, names)}; {step}"


def _nested(name: str, value: Any) -> str:
    """Return a setting as it is written in YAML."""
    *sections, last = name.split(".")
    text = f"{last}: {brief(override_value(value))}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return text


def _with_texts(name: str, value: Any, change: Callable[[str, str], str]) -> Any:
    """Return nested values with each text changed by a function of its dotted name and itself."""
    if isinstance(value, str):
        return change(name, value)
    if isinstance(value, Mapping):
        return {key: _with_texts(f"{name}.{key}".lstrip("."), item, change) for key, item in value.items()}
    return [_with_texts(name, item, change) for item in value] if isinstance(value, list) else value


def _drop_empty(values: dict[str, Any], name: Sequence[str]) -> None:
    """Remove an empty value, by its nested name: of a setting without a default it says no more than its absence."""
    *sections, last = name
    for section in sections:
        values = values.get(section, {})
    if values.get(last) in ("", []):
        del values[last]


def _beside(folder: Path, text: str, *, is_path: bool) -> str:
    """Return the path of what a text names beside the settings file; the text itself if nothing is there.

    An id of the hub looks like a path. Other texts are paths only as `path/to/file.py:name`.
    """
    start = SAVED_ROLLOUTS if text.startswith(SAVED_ROLLOUTS) else ""
    place, end = text.removeprefix(start), ""
    if names_function(text):
        place, colon, names = text.rpartition(":")
        end = colon + names
    elif not is_path:
        return text
    return f"{start}{folder / place}{end}" if place and os.path.exists(folder / place) else text


def _preset(group: str, option: str) -> dict[str, Any]:
    """Return the settings and groups that a preset under configs/ chooses, by dotted name; empty for another word."""
    if option not in preset_names(group):
        return {}
    text = (CONFIG_DIR / group / f"{option}.yaml").read_text(encoding="utf-8")
    content: Any = OmegaConf.to_container(OmegaConf.create(text))
    parts: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        for name, value in entry.items() if isinstance(entry, dict) else ():
            parts |= {_group(name): value, **_preset(_group(name), str(value))}
    return parts | dict(leaves(content, "" if "@package _global_" in text else f"{group}."))
