"""Saved rollouts as demonstrations (`rollouts:<path>`): the ids and masks with which they were sampled.

    rollouts:runs/teacher                               all rollouts of a run
    rollouts:runs/teacher/rollouts/step-000003.jsonl    one step; or the rollouts of an evaluation
    rollouts:samples                                    all files of a directory

Nothing is tokenized again, so the ids must mean to the student what they meant to the model that sampled them: its
tokenizer and chat template are compared with the student's. They are those of `model/` in the run directory, or of the
model that config.yaml or the JSON file of an evaluation names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lockstep.rollout.chat.chat import Chat, load_tokenizer, vocabulary_difference
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import Rollout, TrainingRow
from lockstep.rollout.saved_rollouts import check_ids, read_rollouts
from lockstep.rollout.system.plain_files import read_plain
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.data.datasets import rollout_files


def saved_rows(
    path: str, chat: Chat, *, min_reward: float | None, vocab_size: int, left_out: Counter[str]
) -> Iterator[list[TrainingRow]]:
    """Yield the rows of each rollout that is trained.

    Args:
        chat: of the student.
        min_reward: lowest reward; None: any.
        vocab_size: ids of the student.
        left_out: takes the numbers of the other rollouts by reason.

    Raises `DataError` for files that cannot be read, another tokenizer or chat template, and ids that the student does
    not have.
    """
    files = rollout_files(path)
    for model, template, file in {_sampler(file)[:2]: _sampler(file) for file in files}.values():
        _refuse_other_chat(model, template, file, chat)
    for file in files:
        for rollout in read_rollouts(file):
            if reason := _reason(rollout, min_reward):
                left_out[reason] += 1
                continue
            check_ids([rollout], vocab_size=vocab_size)
            if any(call.images for call in rollout.calls):
                raise DataError(
                    f"{file} has rollouts with images, whose pixels saved rollouts do not hold; leave it out"
                )
            if rows := [row for row in rows_from_calls(rollout.calls) if row.num_trained]:
                yield rows


def _reason(rollout: Rollout, min_reward: float | None) -> str | None:
    """Return the reason for which a rollout is not trained."""
    if not rollout.is_trainable:
        return "failed"
    if min_reward is not None and rollout.reward < min_reward:
        return f"with a reward below {min_reward:g}"
    return None


def _sampler(file: Path) -> tuple[str, str | None, Path]:
    """Return path and chat template of the model that sampled the rollouts of a file, and the file."""
    run, results = file.absolute().parent.parent, file.with_suffix(".json")
    try:
        content = json.loads(read_plain(results)) if results.is_file() else {}
        if "chat_template" in content or not (run / "config.yaml").is_file():
            return str(content["model"]), content.get("chat_template"), file
        if (run / "model" / "tokenizer_config.json").is_file():
            return str(run / "model"), None, file
        model = read_saved(run / "config.yaml").model
        return str(model.path), model.chat_template, file
    except (ConfigError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{file}: the model that sampled these rollouts is unknown ({error}), so nothing shows that its tokenizer "
            f"is the student's; keep config.yaml of the run in {run}, or {results.name} of the evaluation beside the "
            "file"
        ) from error


def _refuse_other_chat(model: str, template: str | None, file: Path, chat: Chat) -> None:
    """Raise `DataError` if ids or prompts of the file mean something else to the student."""
    try:
        sampler = load_tokenizer(model, trust_remote_code=False, template=template)
    except ConfigError as error:
        raise DataError(
            f"{file}: the tokenizer of {model}, which sampled these rollouts, cannot be compared with the student's: "
            f"{error}; copy its files into {file.absolute().parent.parent / 'model'}"
        ) from error
    if (difference := vocabulary_difference(chat.tokenizer.get_vocab(), sampler.get_vocab())) is not None:
        raise DataError(
            f"{file}: {model}, which sampled these rollouts, has another tokenizer than the student: {difference}; "
            "set model.path to a model with its tokenizer"
        )
    if chat.tokenizer.chat_template != sampler.chat_template:
        raise DataError(
            f"{file}: {model}, which sampled these rollouts, has another chat template than the student, who would "
            "learn to answer prompts that it never gets; set model.chat_template=<file with the template of that model>"
        )
