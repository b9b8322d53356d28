"""Errors of the settings in the words of Python: `optimizer={"lr": 1e-5}` in place of `set optimizer.lr=1e-5`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

from lockstep.rollout.errors import ConfigError, LockstepError
from lockstep.rollout.system.user_functions import COPY, OBJECT
from lockstep.trainer.compose import known_keys, preset_names
from lockstep.trainer.config.groups.other_names import MIGRATING, RENAMED, closest_name, replacement
from lockstep.trainer.config.hints import brief
from lockstep.trainer.config.schema import Config
from lockstep.trainer.setting import declarations, free_form

CALLBACKS = {"on_step": ("report",), "on_rollout": ("rollout",), "on_evaluation": ("update", "metrics")}
"""Arguments that are called during the run, with what they get."""
ARGUMENTS = {
    "model.path": "model",
    "data.path": "data",
    "data.heldout_path": "heldout",
    "data.columns": "columns",
    "reward.functions": "rewards",
    "environment.settings.files": "tools",
    "environment.name": "environment",
}
"""Argument of `lockstep.train` that takes the place of a setting."""
NAMES = ("config", "tokenizer", *ARGUMENTS.values(), *CALLBACKS)
"""Arguments of `lockstep.train`, and `environment`."""
OTHER_NAMES = {
    **dict.fromkeys(("processing_class", "processor"), "tokenizer"),
    "callbacks": "on_step",
    "agent": "environment",
}
"""Arguments by their names elsewhere; those that are settings are in `trainer/config/groups/other_names.py`."""
INSTRUCTION = re.compile(r"\b(?:set|type|write|add)\b[^;\n]*")
ASSIGNED = re.compile(r"(?<![\w.\-<{\"'])'?([a-z_][\w.]*)(=|: (?=[{\[]))(?=\S)")
"""A setting and the sign before its value, in an instruction of a command line or of YAML."""
NESTED = re.compile(r"\{(\w+): (.+)\}")
PRESET = re.compile(r"defaults: \[\{(\w+): ([^{}]+)\}\]")
NEAR = 0.7
"""Similarity from which a name is one of the arguments, misspelled."""


@contextmanager
def in_python() -> Iterator[None]:
    """Let errors of the block tell what to write in Python."""
    try:
        yield
    except LockstepError as error:
        error.args = (python_words(str(error)),)
        raise


def python_words(text: str) -> str:
    """Return the text of an error with its instructions for a command line or a settings file in Python."""
    text = text.replace("`--cfg job` prints all of them", "docs/settings.md has all of them")
    text = text.replace(", as YAML reads off, no, on, yes; write it in quotes", ", expected a text")
    return INSTRUCTION.sub(lambda match: _rewritten(match[0]), text)


def refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` with a sentence for each argument, and each key in its dictionary, that is not a setting."""
    if sentences := [_sentence(name, value) for name, value in _unknown(arguments)]:
        raise ConfigError("\n".join(sentences))


def _unknown(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    names, free = known_keys(Config), free_form(Config())
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name.startswith(tuple(f"{one}." for one in free)):
            continue
        if name not in names:
            yield name, value
        elif isinstance(value, Mapping) and name not in free and name not in declarations(Config()):
            yield from _unknown(value, f"{name}.")


def _sentence(name: str, value: Any) -> str:
    if name in CALLBACKS:
        return f"{name} is an argument of lockstep.train and of resume alone; leave it out"
    meant, differs = _meant(name, value)
    if meant is None:
        return f"{name} is not a setting; docs/settings.md has all of them, and {MIGRATING}"
    text = "..." if differs else _source(meant, value)
    suffix = " (docs/migrating.md)" if differs else ""
    return f"{name} is not a setting (did you mean {meant!r}?); write {_assigned(meant, text)}{suffix}"


def _meant(name: str, value: Any) -> tuple[str | None, bool]:
    """Return the argument or setting that a name stands for, and whether its values differ from those of the name."""
    names = sorted(known_keys(Config))
    if name in OTHER_NAMES:
        return OTHER_NAMES[name], False
    if other := replacement(name, names):
        return ARGUMENTS.get(other, other), other not in ARGUMENTS
    if name not in RENAMED and (near := difflib.get_close_matches(name, NAMES, n=1, cutoff=NEAR)):
        return near[0], False
    is_plain = isinstance(value, str | int | float | Mapping) or value is None
    has_end = any(one.endswith(f".{name.rpartition('.')[2]}") for one in names)
    # An object fits only what has its name, not what is spelled alike.
    nearest = closest_name(name, names) if is_plain or has_end else None
    return (ARGUMENTS.get(nearest, nearest) if nearest else None), False


def _source(name: str, value: Any) -> str:
    """Return the value as it is written for an argument or a setting; dots where it does not fit."""
    if name in NAMES:
        own = getattr(value, "__name__", "<")
        text = own if own.isidentifier() else "..."
        return f"[{text}]" if name in ("rewards", "tools") and text != "..." else text
    entry = declarations(Config()).get(name)
    default = entry[0].default if entry else ...
    kinds = ((bool,), (int, float), (str,))
    kind = next((one for one in kinds if isinstance(value, one)), ())
    return brief(_literal(value)) if kind and (default is None or isinstance(default, kind)) else "..."


def _assigned(name: str, value: str) -> str:
    """Return a setting with a value as it is written in a call."""
    if name in ARGUMENTS:
        return f"{ARGUMENTS[name]}={value}"
    first, *rest = name.split(".")
    for key in reversed(rest):
        value = f'{{"{key}": {value}}}'
    return f"{first}={value}"


def _rewritten(instruction: str) -> str:
    instruction = PRESET.sub(r"\1=\2", instruction)
    names, parts, end = known_keys(Config), [], 0
    for match in ASSIGNED.finditer(instruction):
        name = match[1]
        is_setting = name in names or name.rpartition(".")[0] in names or bool(preset_names(name))
        if match.start() < end or not is_setting:
            continue
        value, between = _value(instruction[match.end() :]), instruction[end : match.start()]
        assigned, start = _assigned(name, _from_yaml(value)), f"{name.partition('.')[0]}={{"
        if match[2] != "=" and (inner := NESTED.fullmatch(value)) and f"{name}.{inner[1]}" in ARGUMENTS:
            assigned = _assigned(f"{name}.{inner[1]}", _from_yaml(inner[2]))
        if between == " " and parts and parts[-1].startswith(start) and assigned.startswith(start):
            parts[-1] = f"{parts[-1][:-1]}, {assigned.removeprefix(start)}"  # one dictionary for both
        else:
            parts += [", " if between == " " and parts else between, assigned]
        end = match.end() + len(value)
        if match[0].startswith("'") and instruction[end : end + 1] == "'":
            end += 1
    return "".join([*parts, instruction[end:]])


def _value(text: str) -> str:
    """Return the beginning of a text that is a value: up to a space or comma outside of its brackets and quotes."""
    depth, quote = 0, ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character == '"' or (character == "'" and depth):
            quote = character
        elif character in "{[<(":
            depth += 1
        elif character in "}]>)" and depth:
            depth -= 1
        elif not depth and character in " ,;)'":
            text = text[:position]
            break
    return text if text.endswith("...") else text.rstrip(".")


def _from_yaml(text: str) -> str:
    """Return a value of a command line or of YAML as it is written in Python."""
    if text == "...":
        return text
    try:
        return _literal(yaml.safe_load(re.sub(r"\bNone\b", "null", text)))
    except yaml.YAMLError:
        return json.dumps(text)


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if not isinstance(value, str):
        return repr(value)
    if value.startswith((OBJECT, COPY)):
        return value.partition(":")[2]
    if value == "..." or (value.startswith("<") and value.endswith(">")):
        return value  # for the user to fill in
    try:
        float(value)  # YAML reads 1e-6 as a text
        return value
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
