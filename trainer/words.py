"""Words of a command line that Hydra cannot read, or reads as another type, and what to type instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.command_line import OPTIONS, settings_files
from lockstep.trainer.compose import all_keys
from lockstep.trainer.config.hints import closest

PAIRS = {"[": "]", "{": "}", "(": ")"}


def readable(words: Sequence[str]) -> list[str]:
    """Return words with quotes around texts that hold other letters than those of ASCII: Hydra reads no bare ones."""
    return [_quoted(word) if "=" in word and not word.isascii() else word for word in words]


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    if not re.search(r"[\[\]{}(),'\"]", value):
        return f"{key}='{value}'"
    ends = r"\s,'\"\[\]{}()" + ":" * value.startswith("{")

    def quoted(part: re.Match[str]) -> str:
        return part[0] if part[0].isascii() or part["quoted"] else f"'{part[0]}'"

    pattern = rf"""(?P<quoted>'[^']*'|"[^"]*")|[^{ends}]+"""
    return f"{key}={re.sub(pattern, quoted, value)}"


def refuse_unreadable(words: Sequence[str], tree: DictConfig) -> None:
    """Raise `ConfigError` for the first word that is not `key=value`, or gives a list a single value or the reverse.

    tree: all settings with their defaults.
    """
    keys, files, index = all_keys(tree), settings_files(words), 0
    while index < len(words):
        word, following = words[index], words[index + 1 : index + 2]
        index += 1
        if word.startswith("-") and word != "-":
            name, equals, _ = word.partition("=")
            if name not in OPTIONS:
                raise ConfigError(_option_problem(word, following, keys))
            index += 0 if equals else OPTIONS[name]
        elif word not in files and (problem := _word_problem(word, words[index:], tree, keys)):
            raise ConfigError(problem)


def _option_problem(word: str, following: Sequence[str], keys: Sequence[str]) -> str:
    name, _, value = word.lstrip("-").partition("=")
    if name.replace("_", "-") in ("config", "config-file"):
        return (
            f"{word} is not an option: settings are typed as key=value, a YAML file of them by its path alone; type "
            f"{value or next(iter(following), 'my_run.yaml')}"
        )
    key = name.replace("-", "_")
    value = value or next((word for word in following if "=" not in word and not word.startswith("-")), "<value>")
    if key in keys:
        return f"{word} is not an option: settings have no dashes; type {key}={shlex.quote(value)}"
    return f"{word} is not an option, and settings are typed as key=value{closest(key, keys)}"


def _word_problem(word: str, following: Sequence[str], tree: DictConfig, keys: Sequence[str]) -> str:
    key, equals, value = word.partition("=")
    after = following[0] if following else ""
    if not equals and after.startswith("="):  # updates = 5, updates =5
        value = after[1:] or next(iter(following[1:]), "<value>")
        return f"{word} and = are two words; type {word}={shlex.quote(value)}, without spaces"
    if equals and not value and after and "=" not in after and key in keys:  # updates= 5
        return f"{word} and {after} are two words; type {word}{shlex.quote(after)}, without spaces"
    if equals and (whole := _joined(word, following)) != word:
        return f"{word} is cut at a space; put quotes around the whole: {shlex.quote(whole)}"
    if not equals and (run := Path(word)).joinpath("config.yaml").is_file():
        again = shlex.join([f"run_root={run.parent}", f"run_name={run.name}", "resume=auto"])
        return (
            f"{word} is a run; type {again} to continue it, or {shlex.quote(f'model.path={run}/model')} for its model"
        )
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return _value_problem(word, key, value) if equals else ""
    if not equals or key not in keys:
        return ""
    section, _, name = key.rpartition(".")
    node = (OmegaConf.select(tree, section) if section else tree)._get_node(name)  # a list also where it is null
    default = OmegaConf.select(tree, key)
    is_list, is_typed_list = isinstance(node, ListConfig), value.startswith("[")
    needs_brackets = isinstance(node, ListConfig) and (node._metadata.element_type is str or default is None)
    if needs_brackets and not is_typed_list and value not in ("", "null") and not value.startswith("$"):
        return f"{key} is a list, found {value}; type {shlex.quote(f'{key}=[{value}]')}"
    if is_typed_list and key == "data.path":
        files = zip("abcdefgh", value.strip("[]").split(","), strict=False)
        sources = " ".join(f"data.sources.{name}.path={file.strip()}" for name, file in files)
        return f"{key} takes one value, found the list {value}; for several data sets type {sources}"
    if is_typed_list and not is_list and isinstance(default, str | int | float):
        return f"{key} takes one value, found the list {value}; type {key}={value.strip('[]').partition(',')[0]}"
    if isinstance(default, int) and not isinstance(default, bool) and (number := _whole(value)) is not None:
        return f"{key} is a whole number, found {value}; type {key}={number}"
    return ""


def _value_problem(word: str, key: str, value: str) -> str:
    if value.endswith(","):
        return f"{word} ends with a comma; type {key}={value.rstrip(',')}"
    if value.startswith("{") and "=" in value:
        mapping = value.replace("=", ": ")
        return f"{word} is not a mapping; type {shlex.quote(f'{key}={mapping}')}"
    return f"{word} is not key=value; quote values with spaces, quotes or brackets twice, for example \"{key}='a (b)'\""


def _joined(word: str, following: Sequence[str]) -> str:
    """Return the word with those after it that close its brackets; the word itself if none do."""
    whole = word
    for more in ("", *following):
        whole = f"{whole} {more}".rstrip() if more else whole
        if all(whole.count(opening) == whole.count(closing) for opening, closing in PAIRS.items()):
            return whole
    return word


def _whole(value: str) -> int | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() and not value.lstrip("+-").isdigit() else None
