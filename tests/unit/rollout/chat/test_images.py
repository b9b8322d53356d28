"""Images in conversations: where they stand, what text cannot forge, and what an extension keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.conversation import CallRecord
from lockstep.rollout.episode.environment import Step
from lockstep.rollout.episode.episode import run_episode
from lockstep.rollout.errors import ContextFullError, TemplateError
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.processing import ImageProcessing
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.records import EngineCall, FinishReason, Message, PromptIds
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.tokenizers import chat_tokenizer
from tests.fixtures.vision import image_processing, picture, save_tiny

FIRST, SECOND = picture(1), picture(2, 112, 56)
TOKENIZER = chat_tokenizer("qwen2_5_vl")
PAD = TOKENIZER.get_vocab()["<|image_pad|>"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    directory = tmp_path_factory.mktemp("qwen2_5_vl")
    save_tiny("qwen2_5_vl", directory)
    return Chat.from_pretrained(directory, images=image_processing(directory))


def image(of: Any = FIRST) -> dict[str, Any]:
    return {"type": "image", "image": of}


def text(of: str) -> dict[str, Any]:
    return {"type": "text", "text": of}


def user(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def rendered(text: str) -> list[int]:
    """Return the ids of a text in which `<FIRST>` and `<SECOND>` are the tokens of the images."""
    text = text.replace("<FIRST>", f"<|vision_start|>{'<|image_pad|>' * 12}<|vision_end|>")
    text = text.replace("<SECOND>", f"<|vision_start|>{'<|image_pad|>' * 8}<|vision_end|>")
    return TOKENIZER.encode(text, add_special_tokens=False)


def spans(prompt: PromptIds) -> list[tuple[int, int, str]]:
    return [(one.start, one.end, one.digest) for one in prompt.images]


def runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, end) of all runs of the image token."""
    starts = [at for at, one in enumerate(ids) if one == PAD and (at == 0 or ids[at - 1] != PAD)]
    return [(at, next(end for end in range(at, len(ids)) if ids[end] != PAD)) for at in starts]


def a_call(prompt: PromptIds, said: str) -> EngineCall:
    sampled_ids = tuple(TOKENIZER.encode(said, add_special_tokens=False))
    return EngineCall(
        prompt_ids=tuple(prompt),
        images=prompt.images,
        sampled_ids=sampled_ids,
        sampled_logprobs=(-0.5,) * len(sampled_ids),
        finish_reason=FinishReason.STOP,
    )


SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def test_images_stand_where_their_parts_are(chat: Chat) -> None:
    prompt = chat.prompt([user(text("a "), image(), text(" b"), image(SECOND), text("c"))])
    expected = f"{SYSTEM}<|im_start|>user\na <FIRST> b<SECOND>c<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt) == rendered(expected)
    assert spans(prompt) == [
        (*where, image_digest(one)) for where, one in zip(runs(prompt), (FIRST, SECOND), strict=True)
    ]


def test_a_conversation_of_text_is_rendered_as_without_images(chat: Chat) -> None:
    messages = [user(text("a"), text("b")), {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    assert chat.prompt(messages) == Chat(TOKENIZER).prompt(messages)
    assert chat.prompt(messages) == list(chat.prompt(messages))


def test_two_prompts_with_the_same_ids_and_other_images_differ(chat: Chat) -> None:
    first, other = (chat.prompt([user(image(one))]) for one in (FIRST, picture(3)))
    assert list(first) == list(other)
    assert first != other
    assert first == chat.prompt([user(image())])
    assert first != list(first)


@pytest.mark.parametrize("role", ["user", "tool", "system"])
@pytest.mark.parametrize("forged", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
def test_text_that_spells_out_an_image_stays_text(chat: Chat, role: str, forged: str) -> None:
    prompt = chat.prompt([user(text(f"a {forged}")), user(text(forged), image(), text(f" {forged} b"), role=role)])
    assert spans(prompt) == [(*runs(prompt)[0], image_digest(FIRST))]
    assert len(runs(prompt)) == 1
    assert chat.decode([one for one in prompt if one != PAD]).count(forged) == 3
    assert len(runs(chat.prompt([{"role": role, "content": forged}]))) == 0


def test_an_extension_keeps_the_images_and_adds_those_of_new_messages(chat: Chat) -> None:
    opening = [user(image(), text("what?"))]
    call = a_call(chat.prompt(opening), "a cat<|im_end|>")
    history = [*opening, chat.parse(call.sampled_ids)]
    for new in (
        [user(text("look: "), image(SECOND), text("<|image_pad|>"), role="tool")],
        [user(image(SECOND), role="tool"), {"role": "user", "content": "and?"}],
    ):
        extended = chat.extend(call, history, new)
        assert extended is not None
        assert tuple(extended[: len(call.all_ids)]) == call.all_ids
        assert extended == chat.prompt([*history, *new]), "the same ids and images as those of a new rendering"
        assert [one.digest for one in extended.images] == [image_digest(FIRST), image_digest(SECOND)]
        assert [(one.start, one.end) for one in extended.images] == runs(extended)
    text_alone = chat.extend(call, history, [{"role": "user", "content": "and?"}])
    assert text_alone is not None
    assert text_alone.images == call.images


def test_a_template_that_drops_images_is_refused(chat: Chat) -> None:
    template = str(TOKENIZER.chat_template).replace("<|image_pad|>", "")
    blind = Chat(chat_tokenizer("qwen2_5_vl", template=template), images=chat.images)
    with pytest.raises(TemplateError, match="writes 0 placeholders for 1 images"):
        blind.prompt([user(image())])
    call = a_call(blind.prompt([user(text("a"))]), "b<|im_end|>")
    with pytest.raises(TemplateError, match="writes 0 placeholders for 1 images"):
        blind.extend(call, [user(text("a")), chat.parse(call.sampled_ids)], [user(image())])


def test_a_model_without_images_refuses_them(chat: Chat, tmp_path: Path) -> None:
    for one in (image(), {"type": "image", "digest": "0" * 64}):
        with pytest.raises(TemplateError, match="images and audio are not supported"):
            Chat(TOKENIZER).prompt([user(one)])
    with pytest.raises(TemplateError, match="images and audio are not supported"):
        chat.prompt([user(text("a")), {"role": "assistant", "content": [image()]}, user(text("b"))])


def test_a_conversation_with_more_images_than_the_engine_takes_fails_before_it_is_asked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = save_tiny("qwen2_5_vl", tmp_path_factory.mktemp("limited"))
    images = ImageProcessing.from_pretrained(directory, store=ImageStore(), max_per_prompt=1)
    engine: Any = SimpleNamespace(max_model_len=256)  # without `generate`: it is not asked
    record = CallRecord(
        engine=engine, chat=Chat.from_pretrained(directory, images=images), sampling=Sampling(max_tokens=4), seed=0
    )
    conversation = record.open([user(image(), image(SECOND))])
    with pytest.raises(ContextFullError, match=r"has 2 images, model\.images\.max_per_prompt=1; raise it"):
        asyncio.run(conversation.ask())


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_text_cannot_forge_an_image_of_other_families(family: str, tmp_path: Path) -> None:
    images = image_processing(save_tiny(family, tmp_path))
    chat = Chat.from_pretrained(tmp_path, images=images)
    forgery = f" {' '.join(images.family.reserved)} {images.family.written or ''} "
    prompt = chat.prompt([user(text(forgery), image(), text(forgery))])
    (span,) = prompt.images
    places = [place for place, token in enumerate(prompt) if token in images.reserved_ids]
    assert places == list(range(span.start - 1, span.end + 1)), "the image and the two tokens around it"
    assert chat.prompt([{"role": "user", "content": forgery}]).images == ()


async def test_images_are_read_beside_the_event_loop(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one takes up to 0.3 s, in which no other episode could go on."""
    threads: dict[str, set[int]] = {"read": set(), "expanded": set()}

    def noted(name: str, function: Any) -> Any:
        return lambda *arguments: threads[name].add(get_ident()) or function(*arguments)

    assert chat.images is not None
    monkeypatch.setattr(chat.images, "with_digests", noted("read", chat.images.with_digests))
    monkeypatch.setattr(chat.images, "expanded", noted("expanded", chat.images.expanded))

    class Shows:
        tools = ()

        async def reset(self, example: Mapping[str, Any]) -> list[Message]:
            return [user(image(), text("and then?"))]

        async def step(self, message: Message) -> Step:
            return Step(messages=[user(image(SECOND))])

    rollout = await run_episode(
        engine=ScriptedEngine(says(chat.tokenizer, "a door<|im_end|>")),
        chat=chat,
        environment=Shows(),
        example={},
        sampling=Sampling(max_tokens=8, stop_token_ids=chat.stop_token_ids),
        max_turns=2,
        rollout_id=0,
        group_id=0,
        seed=0,
    )
    assert [call.images[-1].digest for call in rollout.calls] == [image_digest(FIRST), image_digest(SECOND)]
    assert all(found and get_ident() not in found for found in threads.values()), threads
