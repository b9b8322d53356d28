"""Saved rollouts as demonstrations (`rollouts:<path>`): the ids and masks with which they were sampled.

    rollouts:runs/teacher                               all rollouts of a run
    rollouts:runs/teacher/rollouts/step-000003.jsonl    one step; or the rollouts of an evaluation
    rollouts:samples                                    all files of a directory

Nothing is tokenized again, so the ids must mean to the student what they meant to the model that sampled them: its
tokenizer and chat template are compared with the student's. They are those of `model/` in the run directory, or of the
model that config.yaml or the JSON file of an evaluation names.

Images are copied from media/ of the run, or beside the file of an evaluation, into the store of the student's run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.rollout.chat.chat import Chat, load_tokenizer, vocabulary_difference
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, DataError, TemplateError
from lockstep.rollout.records import Rollout, TrainingRow
from lockstep.rollout.saved_rollouts import check_ids, read_rollouts
from lockstep.rollout.system.plain_files import read_plain
from lockstep.trainer.config.saved_config import read_saved
from lockstep.trainer.data.datasets import rollout_files

if TYPE_CHECKING:
    from lockstep.rollout.media.processing import ImageProcessing
    from lockstep.rollout.media.store import ImageStore

MEDIA = "media"
"""Folder of images: in the directory of a run, or beside the results of an evaluation."""


def saved_rows(
    path: str, chat: Chat, *, min_reward: float | None, vocab_size: int, left_out: Counter[str]
) -> Iterator[list[TrainingRow]]:
    """Yield the rows of each rollout that is trained.

    Args:
        chat: of the student.
        min_reward: lowest reward; None: any.
        vocab_size: ids of the student.
        left_out: takes the numbers of the other rollouts by reason.

    Raises `DataError` for files that cannot be read, another tokenizer or chat template, ids that the student does not
    have, and images that are missing or that the student reads as another number of tokens.
    """
    files = rollout_files(path)
    for model, template, file in {_sampler(file)[:2]: _sampler(file) for file in files}.values():
        _refuse_other_chat(model, template, file, chat)
    for file in files:
        stored = None if chat.images is None else _stored_images(file)
        for rollout in read_rollouts(file):
            if reason := _reason(rollout, min_reward):
                left_out[reason] += 1
                continue
            check_ids([rollout], vocab_size=vocab_size)
            if rows := [row for row in rows_from_calls(rollout.calls) if row.num_trained]:
                for row in rows:
                    _take_images(row, chat.images, stored, place=f"{file}, rollout {rollout.rollout_id}")
                yield rows


def _stored_images(file: Path) -> ImageStore:
    from lockstep.rollout.media.store import ImageStore  # runs without images do not load it

    beside, of_run = (folder / MEDIA for folder in file.absolute().parents[:2])
    return ImageStore(beside if beside.is_dir() else of_run)


def _take_images(row: TrainingRow, images: ImageProcessing | None, stored: ImageStore | None, *, place: str) -> None:
    """Put the images of a row into the store of the student's run. stored: images of the run that sampled it."""
    if images is None or stored is None:
        if row.images:
            raise DataError(
                f"{place} has images; set model.images.max_per_prompt={len(row.images)} or more to see them"
            )
        return
    if images.max_per_prompt is not None and len(row.images) > images.max_per_prompt:
        raise DataError(
            f"{place} has {len(row.images)} images, model.images.max_per_prompt={images.max_per_prompt}; raise it"
        )
    for span in row.images:
        try:
            images.store.add(stored.image(span.digest))
            expected = images.prepared(span.digest).num_tokens
        except (DataError, TemplateError) as error:
            raise DataError(
                f"{place}: its image {span.digest} cannot be used: {error}; keep {MEDIA}/ where the run or evaluation "
                "wrote it"
            ) from error
        if span.end - span.start != expected:
            raise DataError(
                f"{place} has {span.end - span.start} tokens for the image {span.digest}, and the student's image "
                f"processor gives it {expected}; set model.path to a model that reads images as the one that sampled it"
            )
    of_images = [index for span in row.images for index in range(span.start, span.end)]
    if np.flatnonzero(row.ids == images.image_token_id).tolist() != of_images:
        raise DataError(f"{place} has image tokens that are not those of its images; leave it out")


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
