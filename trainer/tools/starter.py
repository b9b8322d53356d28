"""Settings file for a task of one's own, written from a look at its rows (`lockstep init`).

What the rows that were looked at show is proposed, with the reason beside it. What they do not show is left open, as a
comment, and named: the model always, the prompt where no column has a usual name, the reward where no column holds a
reference of a kind that a built-in function reads.
"""

from __future__ import annotations

import json
import math
import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import yaml

from lockstep.rewards.functions.answers import ANSWER_COLUMNS
from lockstep.rewards.functions.numbers import only_number
from lockstep.rollout.environments.prompt import (
    IMAGE_COLUMNS,
    PROMPT_COLUMNS,
    image_values,
    is_empty,
    is_image_file,
    num_images,
)
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.trainer.config.groups.rollout_settings import RolloutConfig
from lockstep.trainer.data.datasets import is_file, load_rows
from lockstep.trainer.data.reader import Row
from lockstep.trainer.data.row_images import VALUES, undecoded

LOOKED_AT = 200
"""Rows from which proposals are made."""
QUESTIONS = ("problem", "instruction", "query", "input", "task", "text")
"""Usual names of the column with the prompt, beside those that are read without being named."""
REFERENCES = (*ANSWER_COLUMNS, "result", "expected", "label", "output", "final_answer")
HELD_OUT = ("heldout", "test", "valid", "validation", "val", "dev", "eval")
"""Words that stand in the name of a file of held-out rows where that of the training rows has `train`."""
CONTEXT, MOST_SAMPLED = 2048, 512
"""Context and limit of an answer to begin with [tokens]: room for a short chain of thought, on any device."""
SHORT = 60
"""Most characters of a reference that an answer is expected to repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A value of the file, with the reason."""

    value: str | None
    """None: it is left open."""
    reason: str


def prompt_column(rows: Sequence[Row]) -> Proposal:
    """Propose the column with the prompt: one that is read by itself, or one of a usual name."""
    names = _names(rows)
    filled = [name for name in names if _is_filled(rows, name)]
    for name in PROMPT_COLUMNS:
        if name in filled:
            return Proposal(value=name, reason=f"column {name} is read as the prompt{_gaps(rows, name)}")
    texts = [name for name in filled if all(isinstance(value, str) for value in _values(rows, name))]
    usual_names = (*PROMPT_COLUMNS, *QUESTIONS)
    if usual := _pick(texts, usual_names):
        return Proposal(value=usual[0], reason=f"its name is usual for a prompt{_gaps(rows, usual[0])}")
    if rivals := [name for name in _pick(names, usual_names) if name not in filled]:
        return Proposal(value=None, reason=f"column {_yaml(rivals[0])} has gaps{_gaps(rows, rivals[0])}")
    references = _pick(texts, REFERENCES)
    others = [name for name in texts if name not in references]
    if len(others) == 1:
        return Proposal(value=None, reason=f"it may be {_yaml(others[0])}, the only text beside the reference")
    return Proposal(value=None, reason=f"no column is named like a prompt; there are {_listed(names)}")


def reference_column(rows: Sequence[Row], *, prompt: str | None) -> Proposal:
    """Propose the column with the reference answer."""
    usual = [name for name in _pick(_names(rows), REFERENCES) if name != prompt]
    names = [name for name in usual if _is_filled(rows, name)]
    if names:
        others = f"; {_listed(names[1:])} might be, too" if names[1:] else ""
        return Proposal(value=names[0], reason=f"its name is usual for a reference{_gaps(rows, names[0])}{others}")
    if usual:
        return Proposal(value=None, reason=f"column {_yaml(usual[0])} has gaps{_gaps(rows, usual[0])}")
    return Proposal(value=None, reason="no column is named like a reference answer")


def reward_function(rows: Sequence[Row], reference: str | None) -> Proposal:
    """Propose a built-in reward for the values of the reference column."""
    if reference is None:
        return Proposal(value=None, reason="no column holds a reference answer")
    values = _values(rows, reference)
    if all(only_number(value) is not None for value in values):
        return Proposal(value="numeric", reason=f"each {reference} states one number")
    if not all(isinstance(value, str) for value in values):
        return Proposal(value=None, reason=f"{reference} is not a text in every row, so only you know what is right")
    if any(sign in value for value in values for sign in ("\\frac", "\\sqrt", "\\boxed", "^{", "$")):
        return Proposal(value="math_equal", reason=f"{reference} has formulas; needs pip install 'lockstep-rl[math]'")
    if all(len(value) <= SHORT and "\n" not in value for value in values):
        return Proposal(value="exact_match", reason=f"each {reference} is a short text, which the answer has to equal")
    return Proposal(value=None, reason=f"{reference} has long texts, which an answer will not repeat word for word")


def image_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of which every filled row holds images or paths of images: those of usual names first."""
    names = sorted(_names(rows), key=lambda name: (*IMAGE_COLUMNS, name).index(name))
    filled = {name: [values for row in rows if (values := image_values(row.get(name)))] for name in names}
    return [name for name in names if filled[name] and all(map(_is_picture, chain.from_iterable(filled[name])))]


def most_images(rows: Sequence[Row], *, column: str | None, prompt: str | None) -> Proposal:
    """Propose `model.images.max_per_prompt`; None for rows without images. column: with images. prompt: with messages
    that may show images."""
    turns = [row.get(prompt) for row in rows] if prompt else []
    messages = [
        value for value in turns if isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value)
    ]
    counts = [len(image_values(row.get(column))) for row in rows] if column else []
    most = max([*counts, *map(num_images, messages)], default=0)
    where = f"column {_yaml(column)}" if column else f"the messages of column {_yaml(prompt)}"
    also = "more where tools or an environment return images, too"
    return Proposal(value=str(most) if most else None, reason=f"the most that {where} holds in these rows; {also}")


def held_out_file(path: str) -> str | None:
    """Return the file beside the training rows whose name says that it is held out."""
    place = Path(os.path.expanduser(path))
    if not is_file(path) or "train" not in place.stem:
        return None
    names = (place.with_name(place.name.replace("train", word)) for word in HELD_OUT)
    return next((str(name) for name in names if name.is_file()), None)


def context_of(model: str | None) -> int:
    """Return the context to begin with: `CONTEXT`, or that of the model where its files are here and it is shorter."""
    if model is None:
        return CONTEXT
    try:
        path: Any = Path(os.path.expanduser(model)) / "config.json"
        if not path.is_file():
            from huggingface_hub import try_to_load_from_cache  # a local model does not need it

            path = try_to_load_from_cache(model, "config.json")
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # not here, or not a config
        return CONTEXT
    values = ((config.get("text_config") or config).get(name) for name in ("max_position_embeddings", "n_positions"))
    return min(CONTEXT, *(value for value in values if isinstance(value, int)), CONTEXT)


def starter(data: str, *, model: str | None = None, split: str = "train", out: Path) -> str:
    """Return the text of a settings file for the rows at a path.

    data: file or hub id. out: where the text will be written; paths in it are relative to that. Raises `DataError` or
    `ConfigError` if the rows cannot be read.
    """
    loaded = load_rows(data, split)
    all_rows = list(islice(undecoded(loaded), LOOKED_AT))
    pictures = image_columns(all_rows)
    rows = [{name: value for name, value in row.items() if name not in pictures} for row in all_rows]
    prompt = prompt_column(rows)
    images = most_images(all_rows, column=next(iter(pictures), None), prompt=prompt.value)
    last = next(iter(_values(rows, prompt.value or "")), None)
    if isinstance(last, Sequence) and last and isinstance(last[-1], Mapping) and last[-1].get("role") == "assistant":
        raise ConfigError(
            f"{data}: column {prompt.value} ends with the assistant's turn in the first row, so these are "
            "demonstrations; train on them with algorithm=sft (docs/demonstrations.md)"
        )
    reference = reference_column(rows, prompt=prompt.value)
    reward = reward_function(rows, reference.value)
    path = _relative(data, out)
    held_out = held_out_file(data)
    renamed = {
        **({"prompt": prompt.value} if prompt.value and prompt.value not in PROMPT_COLUMNS else {}),
        **({"answer": reference.value} if reward.value and reference.value != "answer" else {}),
        **({"images": pictures[0]} if pictures and pictures[0] not in IMAGE_COLUMNS else {}),
        **dict.fromkeys(pictures[1:]),
    }
    columns = ", ".join(f"{name}: {_yaml(column)}" for name, column in renamed.items())
    context = context_of(model)
    defaults = RolloutConfig()
    lines = [
        f"# A run on {_yaml(path)}, proposed by `lockstep init` from {len(rows)} of {len(loaded)} rows. Change what is",
        "# wrong, then look at the whole without an engine, and train:",
        f"#     lockstep train {_yaml(out.name)} dry_run=true",
        f"#     lockstep train {_yaml(out.name)}",
        "# docs/settings_file.md says what may stand here, docs/settings.md lists all settings.",
        "",
        *(["model:"] if model or images.value else ["# model:"]),
        f"  path: {_yaml(model)}  # a directory or a hub id"
        if model
        else "#   path: <a directory or a hub id>  # left open: write it here",
        *(["  images:", f"    max_per_prompt: {images.value}  # {images.reason}"] if images.value else []),
        "",
        "data:",
        f"  path: {_yaml(path)}",
        f"  heldout_path: {_yaml(held_out and _relative(held_out, out))}  # "
        + ("a file of that name lies beside it" if held_out else "rows for evaluations, which are never trained"),
        *([f"  split: {_yaml(split)}"] if not is_file(data) and split != "train" else []),
        f"  # columns: {_listed(_names(all_rows))}",
        f"  # prompt: {prompt.reason}" + ("" if prompt.value else "; left open: write columns: {prompt: <column>}"),
        f"  # reference: {reference.reason}",
        *([f"  # images: those of column {_yaml(pictures[0])} are shown"] if pictures else []),
        *([f"  columns: {{{columns}}}  # as the environment and the reward read them"] if columns else []),
        "",
        "environment:",
        "  name: single_turn  # one answer to each prompt; tools, games and agents: docs/environments.md",
        "",
        *(
            ["reward:", f"  functions: [{reward.value}]  # {reward.reason}"]
            if reward.value
            else ["# reward:", f"#   functions: [rewards.py:name]  # {reward.reason}; left open: a function f(rollout)"]
        ),
        "",
        "rollout:",
        "  prompts_per_step: 16",
        "  samples_per_prompt: 8  # answers that are compared with each other",
        f"  max_tokens_per_turn: {min(MOST_SAMPLED, context // 2)}  # longer answers are cut (without this line: "
        f"{defaults.max_tokens_per_turn})",
        f"  max_model_len: {context}  # prompt{' with its images' * bool(images.value)} and answer (without this line: "
        f"{defaults.max_model_len})",
        "",
        *(
            ["eval:", "  every: 20  # updates between evaluations on the held-out rows", "  before_training: true", ""]
            if held_out
            else []
        ),
        "updates: 100",
    ]
    return "\n".join(lines) + "\n"


def write_starter(data: str, out: Path, *, model: str | None = None, split: str = "train") -> list[str]:
    """Write the settings file; return what is left open, a sentence each.

    Raises `ConfigError` if the file exists, and as `starter`.
    """
    if out.exists():
        raise ConfigError(f"{out} exists and is not overwritten; write --out <another name>, or remove it")
    text = starter(data, model=model, split=split, out=out)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}") from error
    return [line.strip("# ") for line in text.splitlines() if "left open" in line]


def _is_picture(value: Any) -> bool:
    """True for the bytes or the path of an image, also inside of an object."""
    while isinstance(value, Mapping):
        value = next((value[key] for key in VALUES if value.get(key) is not None), None)
    return is_image_file(value)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _pick(names: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Return the names that are usual, in the order of `usual`, whatever their case."""
    return [name for one in usual for name in names if name.lower() == one]


def _values(rows: Sequence[Row], name: str) -> list[Any]:
    return [row[name] for row in rows if not is_empty(row.get(name))]


def _is_filled(rows: Sequence[Row], name: str) -> bool:
    """Return True for a column with a value in nine of ten rows, or in all but one."""
    filled = len(_values(rows, name))
    return 0 < filled >= len(rows) - max(1, len(rows) // 10)


def _gaps(rows: Sequence[Row], name: str) -> str:
    """Return how many rows lack a value, as the end of a sentence."""
    empty = len(rows) - len(_values(rows, name))
    return f"; {empty} of {len(rows)} rows are empty: fill them, or leave them out" if empty else ""


def _relative(path: str, out: Path) -> str:
    """Return a file's path as a settings file at `out` names it; hub ids stay."""
    place = Path(os.path.expanduser(path)).absolute()
    folder = out.absolute().parent
    return place.relative_to(folder).as_posix() if place.is_file() and place.is_relative_to(folder) else path


def _yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    is_plain = isinstance(value, str) and re.fullmatch(r"\w[\w./-]*", value) and yaml.safe_load(value) == value
    if value is None or is_plain:
        return "null" if value is None else value
    return yaml.safe_dump(value, default_style='"', width=math.inf).rstrip("\n")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(_yaml, names)) or "none"
