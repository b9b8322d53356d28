"""Demonstrations with images: their rows carry the images of the conversation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.episode.demonstration import demonstrated_calls
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import DataError
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.processing import ImageProcessing
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.records import Rollout
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.data.demonstrations import Demonstration, load_demonstrations
from lockstep.trainer.sft.demonstration_rows import batch_of
from tests.fixtures.tokenizers import chat_tokenizer
from tests.fixtures.vision import image_processing, picture, save_tiny

FIRST, SECOND = picture(1), picture(2, 112, 56)
ANSWER = {"role": "assistant", "content": "a cat"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    directory = save_tiny("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))
    return Chat.from_pretrained(directory, images=image_processing(directory))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    FIRST.save(tmp_path / "a.png")
    SECOND.save(tmp_path / "b.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:-500])
    return tmp_path


def load(path: Path, chat: Chat, **settings: Any) -> list[Demonstration]:
    data_set = DataSetConfig(path=str(path), split="train")
    return load_demonstrations(data_set, chat, max_tokens=None, vocab_size=10**6, say=lambda text: None, **settings)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(of: str) -> dict[str, str]:
    return {"type": "text", "text": of}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [text(one) if isinstance(one, str) else one for one in content]}


PLACE = {"type": "image"}
EXPECTED = [user({**PLACE, "image": FIRST}, "what?"), ANSWER, user("or ", {**PLACE, "image": SECOND}, "?"), ANSWER]


def check(demonstration: Demonstration, chat: Chat) -> None:
    (expected,) = rows_from_calls(demonstrated_calls(chat, EXPECTED))
    (row,) = batch_of([demonstration]).rows
    np.testing.assert_array_equal(row.ids, expected.ids)
    np.testing.assert_array_equal(row.loss_mask, expected.loss_mask)
    assert row.images == expected.images
    assert [span.digest for span in row.images] == [image_digest(FIRST), image_digest(SECOND)]
    assert chat.images is not None
    assert [chat.images.store.image(span.digest).size for span in row.images] == [FIRST.size, SECOND.size]


def test_rows_carry_the_images_of_their_conversation(folder: Path, chat: Chat) -> None:
    parts = [user(PLACE, "what?"), ANSWER, user("or ", PLACE, "?"), ANSWER]
    values = [user({**PLACE, "image": "a.png"}, "what?"), ANSWER, user("or ", {**PLACE, "image": "b.png"}, "?"), ANSWER]
    markers = [user("<image>what?"), ANSWER, {"role": "user", "content": "or <image>?"}, ANSWER]
    images = ["a.png", "b.png"]
    rows = [
        {"messages": parts, "images": images},
        {"messages": values},
        {"messages": markers, "images": images},
        {"messages": json.dumps(values)},
        {"messages": json.dumps(markers), "images": images},
    ]
    found = load(write(folder / "rows.jsonl", *rows), chat, max_images=2)
    assert len(found) == len(rows)
    for demonstration in found:
        check(demonstration, chat)


def test_images_of_tables_of_datasets_are_read(folder: Path, chat: Chat) -> None:
    answer = {**ANSWER, "content": [text("a cat")]}
    row = {"messages": [user(PLACE, "what?"), answer, user("or ", PLACE, "?"), answer], "images": [FIRST, SECOND]}
    table = datasets.Dataset.from_list([row])
    assert "Image(" in str(table.features["images"])
    table.to_parquet(folder / "rows.parquet")
    (demonstration,) = load(folder / "rows.parquet", chat)
    check(demonstration, chat)


def test_conversations_without_images_are_those_of_a_chat_without(folder: Path, chat: Chat) -> None:
    path = write(folder / "rows.jsonl", {"messages": [user("an <image> tag"), ANSWER]})
    ((one,),), ((other,),) = load(path, chat), load(path, Chat(chat_tokenizer("qwen2_5_vl")))
    np.testing.assert_array_equal(one.ids, other.ids)
    assert one.images == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [user("<image>", "<image>"), ANSWER], "images": ["a.png"]},
            "places for images in the prompt: 2",
        ),
        ({"messages": [user("a"), ANSWER], "images": ["c.png"]}, "column images, image 0: the image cannot be read"),
        ({"messages": [user("a"), ANSWER], "image": "cut.png"}, "column image, image 0: the image cannot be read"),
        (
            {"messages": [user("a"), ANSWER], "images": ["a.png"] * 3},
            "the prompt has 3 images, model.images.max_per_prompt=2",
        ),
        (
            {"messages": [user("a"), {**ANSWER, "content": [PLACE]}], "image": "a.png"},
            "it cannot be trained: message 1",
        ),
    ],
)
def test_a_conversation_that_cannot_be_trained_is_refused_with_its_place(
    row: Any, words: str, folder: Path, chat: Chat
) -> None:
    good = {"messages": [user("a"), ANSWER], "image": "a.png"}
    with pytest.raises(DataError, match=rf"1 of 3 rows cannot be used(?s:.*)line 2: {words}"):
        load(write(folder / "rows.jsonl", good, row, good), chat, max_images=2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [user("a"), ANSWER], "images": ["a.png"]},
            "column images holds images; set model.images.max_per_prompt=",
        ),
        ({"messages": [user(PLACE), ANSWER]}, "its messages hold images; set model.images.max_per_prompt="),
    ],
)
def test_images_are_refused_in_a_run_without(row: Any, words: str, folder: Path) -> None:
    with pytest.raises(DataError, match=f"line 1: {words}"):
        load(write(folder / "rows.jsonl", row), Chat(chat_tokenizer("qwen2_5_vl")))


@pytest.fixture
def run(folder: Path, chat: Chat) -> Path:
    """Write a run that sampled one rollout with two images."""
    run = folder / "run"
    (run / "rollouts").mkdir(parents=True)
    calls = tuple(demonstrated_calls(chat, EXPECTED))
    rollout = Rollout(rollout_id=7, group_id=0, calls=calls, messages=tuple(chat.with_digests(EXPECTED)), reward=1.0)
    write_rollouts(run / "rollouts" / "step-000001.jsonl", [rollout])
    (run / "config.yaml").write_text(f"model:\n  path: {chat.tokenizer.name_or_path}\n  chat_template: null\n")
    for image in (FIRST, SECOND):
        ImageStore(run / "media").add(image)
    return run


def saved(run: Path, chat: Chat) -> list[Demonstration]:
    return load(Path(f"rollouts:{run}"), chat)


def student(chat: Chat, media: Path, **settings: Any) -> Chat:
    """Return the chat of a run that has no image so far."""
    images = ImageProcessing.from_pretrained(chat.tokenizer.name_or_path, store=ImageStore(media), **settings)
    return Chat.from_pretrained(chat.tokenizer.name_or_path, images=images)


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_saved_rollouts_bring_their_images_into_the_run(
    run: Path, chat: Chat, tmp_path: Path, is_evaluation: bool
) -> None:
    if is_evaluation:
        (run / "media").rename(run / "rollouts" / "media")
        results = {"model": chat.tokenizer.name_or_path, "chat_template": None}
        (run / "rollouts" / "step-000001.json").write_text(json.dumps(results))
    learner = student(chat, tmp_path / "own", max_per_prompt=2)
    (demonstration,) = saved(run, learner)
    check(demonstration, learner)
    assert {file.stem for file in (tmp_path / "own").iterdir()} == {image_digest(FIRST), image_digest(SECOND)}


def test_saved_rollouts_whose_images_cannot_be_used_are_refused(run: Path, chat: Chat, tmp_path: Path) -> None:
    digest, file = image_digest(FIRST), run / "media" / f"{image_digest(FIRST)}.png"
    place = f"^{run}/rollouts/step-000001.jsonl, rollout 7"
    with pytest.raises(DataError, match=f"{place} has 2 images, model.images.max_per_prompt=1; raise it"):
        saved(run, student(chat, tmp_path / "few", max_per_prompt=1))
    with pytest.raises(DataError, match=f"{place} has images; set model.images.max_per_prompt=2 or more"):
        saved(run, Chat.from_pretrained(chat.tokenizer.name_or_path))
    learner = student(chat, tmp_path / "own")
    SECOND.save(file)
    with pytest.raises(DataError, match=f"{place}: its image {digest} cannot be used: {file} holds another image"):
        saved(run, learner)
    file.unlink()
    with pytest.raises(
        DataError, match=f"{place}: its image {digest} cannot be used: {file} holds no image: .*keep me"
    ):
        saved(run, learner)
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '"longest_edge": 12544',
            '"longest_edge": 6272',
            r"has \d+ tokens for the image .* gives it \d+; set model.path",
        ),
        (None, None, "has image tokens that are not those of its images; leave it out"),
    ],
)
def test_saved_rollouts_whose_ids_do_not_fit_the_images_are_refused(
    run: Path, chat: Chat, tmp_path: Path, old: str | None, new: str | None, words: str
) -> None:
    learner = chat
    if old is not None and new is not None:
        path = shutil.copytree(chat.tokenizer.name_or_path, tmp_path / "other")
        text = (path / "processor_config.json").read_text()
        assert old in text
        (path / "processor_config.json").write_text(text.replace(old, new))
        learner = Chat.from_pretrained(path, images=image_processing(path))
    else:
        file = run / "rollouts" / "step-000001.jsonl"
        assert chat.images is not None
        saved_rollout = json.loads(file.read_text())
        saved_rollout["calls"][0]["prompt_ids"][0] = chat.images.image_token_id
        write(file, saved_rollout)
    with pytest.raises(DataError, match=f"rollout 7 {words}"):
        saved(run, learner)
