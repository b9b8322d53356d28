"""Conflicts of demonstrations with other settings, and the first row of those in local files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lockstep.rollout.errors import DataError
from lockstep.trainer.config.groups.data_settings import SAVED_ROLLOUTS, DataSetConfig, DemonstrationsConfig
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.data.datasets import is_at_hand, json_or_text, read_first_row, rename, rollout_files
from lockstep.trainer.setting import typed


def demonstration_problems(
    settings: DemonstrationsConfig, teacher: TeacherConfig, sets: Collection[DataSetConfig]
) -> Iterator[str]:
    """Yield one sentence per conflict between demonstrations and their teacher. sets: those that are trained."""
    kind = settings.teacher_divergence
    word = f"demonstrations.teacher_divergence={kind}"
    if teacher.source == "saved":
        yield from _saved_teacher_problems(teacher, settings, sets)
    elif kind != "off" and (teacher.path is None or teacher.source != "model"):
        yield (
            f"{word} learns from the model at teacher.path, found teacher.path={typed(teacher.path)} and "
            f"teacher.source={teacher.source}; set teacher.source=model teacher.path=<directory or hub id of a model "
            "with the policy's tokenizer>, teacher.source=saved for saved rollouts with scores of a teacher, or "
            "demonstrations.teacher_divergence=off"
        )
    elif kind != "off" and teacher.context is not None:
        yield (
            f"{word} with teacher.context={typed(teacher.context)}: the teacher reads demonstrations as they are; set "
            "teacher.context=null, or demonstrations.teacher_divergence=off"
        )


def saved_prompt_problems(sets: Iterable[DataSetConfig], algorithm: str) -> Iterator[str]:
    """Yield one sentence per data set of prompts that holds saved rollouts."""
    for data_set in sets:
        if data_set.is_saved:
            yield (
                f"{data_set.path} is data of algorithm={algorithm}, which samples from prompts; "
                f"set algorithm=sft, or demonstrations.path={data_set.path} to train them beside its own"
            )


def _saved_teacher_problems(
    teacher: TeacherConfig, settings: DemonstrationsConfig, sets: Collection[DataSetConfig]
) -> Iterator[str]:
    kind, path = settings.teacher_divergence, teacher.path
    others = [one.path for one in sets if not one.is_saved]
    if kind == "off" or others or not sets:
        demonstrations = ", ".join(others) if others else typed(settings.path)
        yield (
            "teacher.source=saved takes scores from beside the rollouts of a run, for a divergence; found "
            f"demonstrations.teacher_divergence={kind} and demonstrations of {demonstrations}; set "
            "demonstrations.teacher_divergence=forward, and demonstrations.path=rollouts:<run with a teacher> (with "
            "algorithm=sft data.path), or teacher.source=model"
        )
    if path is not None:
        yield (
            f"teacher.path={path} does nothing with teacher.source=saved, which scores nothing; set teacher.path=null "
            "or teacher.source=model"
        )


def demonstration_row_problems(sets: Iterable[DataSetConfig]) -> Iterator[str]:
    """Yield one sentence per local file whose first row is not a conversation."""
    for data_set in sets:
        if data_set.is_saved:
            try:
                rollout_files(data_set.path)
            except DataError as error:
                yield str(error)
        elif is_at_hand(data_set.path):
            try:
                row = rename(read_first_row(data_set.path), data_set.columns or {}, of=data_set.path)
            except DataError as error:
                yield str(error)
            else:
                yield from _row_problems(row, data_set)


def _row_problems(row: Mapping[str, Any], data_set: DataSetConfig) -> Iterator[str]:
    if {"messages", "calls"} <= row.keys():
        yield (
            f"data set {data_set.path} holds saved rollouts, whose text would be tokenized again, without their tools; "
            f"set its path to {SAVED_ROLLOUTS}{data_set.path}, or leave out `calls` to train them as text"
        )
        return
    messages = row.get("messages")
    messages = json_or_text(messages) if isinstance(messages, str) else messages
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        yield (
            f"data set {data_set.path}: the first row has no list of messages; it has {', '.join(row) or 'nothing'}; "
            "expected conversations in OpenAI's format, {messages: [{role: user, content: ...}, {role: assistant, "
            "content: ...}]} (docs/sft.md)"
        )
    elif not any(message.get("role") == "assistant" for message in messages):
        yield (
            f"data set {data_set.path}: the conversation of the first row has no assistant turn to train; expected a "
            "message with role assistant"
        )
