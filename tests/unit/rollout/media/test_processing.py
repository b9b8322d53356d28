from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import ConfigError, DataError, EvidenceError, TemplateError
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.processing import ImageProcessing, refuse_other_images
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.records import image_parts
from lockstep.rollout.weights.canary_prompt import canary_prompt
from tests.fixtures.models import save_tiny_model
from tests.fixtures.tokenizers import chat_tokenizer
from tests.fixtures.vision import image_processing, picture, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2_5_vl")
    save_tiny("qwen2_5_vl", directory)
    return directory


@pytest.fixture(scope="module")
def families(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"qwen2_5_vl": model, "gemma3": save_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))}


@pytest.fixture
def images(model: Path) -> ImageProcessing:
    return image_processing(model)


def test_each_image_is_prepared_as_transformers_prepares_all(model: Path, images: ImageProcessing) -> None:
    pictures = [picture(1), picture(2, 112, 56)]
    prepared = [images.prepared(images.store.add(one)) for one in pictures]
    expected = AutoProcessor.from_pretrained(model)(
        images=pictures, text="<|image_pad|> <|image_pad|>", return_tensors="pt"
    )
    for name in images.family.tensors:
        assert torch.equal(torch.cat([one.tensors[name] for one in prepared]), expected[name])
    assert [one.num_tokens for one in prepared] == [12, 8]
    assert sum(one.num_tokens for one in prepared) == int((expected["input_ids"] == images.image_token_id).sum())
    assert [one.digest for one in prepared] == list(map(image_digest, pictures))


def test_an_image_is_prepared_once(images: ImageProcessing, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = images.store.add(picture(1))
    first = images.prepared(digest)
    monkeypatch.setattr(images, "_processor", lambda **_: pytest.fail("prepared again"))
    assert images.prepared(digest) is first


def test_messages_name_images_by_digests(images: ImageProcessing) -> None:
    text = {"type": "text", "text": "what is it?"}
    message = {"role": "user", "content": [{"type": "image", "image": picture(1)}, text]}
    plain = {"role": "system", "content": "look"}
    first, named = images.with_digests([plain, message])
    assert first is plain
    assert named == {"role": "user", "content": [{"type": "image", "digest": image_digest(picture(1))}, text]}
    assert images.with_digests([named]) == [named]
    assert image_digest(images.store.image(image_parts(named)[0]["digest"])) == image_digest(picture(1))
    json.dumps(named)


def test_images_that_cannot_be_read_or_prepared_are_refused_with_their_place(images: ImageProcessing) -> None:
    for value, says in ((b"", "cannot be read"), (picture(1, 2000, 4), "refuses an image of 2000 x 4 pixels")):
        message = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": value}]}
        with pytest.raises(TemplateError, match=r"^message 1, part 1: .*" + says):
            images.with_digests([{"role": "user", "content": "go"}, message])


def test_placeholders_become_as_many_ids_as_their_images_have(images: ImageProcessing) -> None:
    parts = [{"type": "image", "image": picture(1)}, {"type": "image", "image": picture(2, 112, 56)}]
    messages = images.with_digests([{"role": "user", "content": parts}])
    pad = images.image_token_id
    prompt = images.expanded([1, pad, 2, pad, 3], messages)
    assert list(prompt) == [1, *[pad] * 12, 2, *[pad] * 8, 3]
    assert [(one.start, one.end) for one in prompt.images] == [(1, 13), (14, 22)]
    assert [one.digest for one in prompt.images] == [image_digest(picture(1)), image_digest(picture(2, 112, 56))]
    for ids in ([1, pad, 2], [pad, pad, pad]):
        with pytest.raises(TemplateError, match=f"writes {ids.count(pad)} placeholders for 2 images"):
            images.expanded(ids, messages)
    with pytest.raises(TemplateError, match="writes 1 placeholders for 0 images"):
        images.expanded([1, pad], [{"role": "user", "content": "go"}])


def test_an_unknown_digest_is_refused(images: ImageProcessing) -> None:
    message = {"role": "user", "content": [{"type": "image", "digest": "0" * 64}]}
    with pytest.raises(DataError, match="no image has the digest"):
        images.expanded([images.image_token_id], [message])


def test_models_without_images_or_their_files_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"images are not supported for model type qwen3, only for qwen2_5_vl, "):
        ImageProcessing.from_pretrained(save_tiny_model(tmp_path / "text", tied=True), store=ImageStore())
    without = Path(shutil.copytree(model, tmp_path / "without"))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (without / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"no loadable image processor .*preprocessor_config\.json"):
        ImageProcessing.from_pretrained(without, store=ImageStore())
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"image_token_id": 7}))
    with pytest.raises(ConfigError, match=r"config\.json has the image token 7, and <\|image_pad\|> of the"):
        ImageProcessing.from_pretrained(other, store=ImageStore())


def test_a_prompt_that_was_expanded_is_not_expanded_again(images: ImageProcessing) -> None:
    messages = images.with_digests([{"role": "user", "content": [{"type": "image", "image": picture(1)}]}])
    prompt = images.expanded([1, images.image_token_id, 2], messages)
    with pytest.raises(TemplateError, match="writes 12 placeholders for 1 images"):
        images.expanded(prompt, messages)


TEXTS = {"before": {"type": "text", "text": "see\n\n"}, "after": {"type": "text", "text": "what is it?"}}


@pytest.mark.parametrize(
    "order", [(1,), (1, 2), ("before", 1, "after"), ("before", 1, "after", 2), (1, "after", "before", 2, 1)]
)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_ids_of_a_prompt_are_those_of_the_processor_of_transformers(
    families: dict[str, Path], family: str, order: tuple[int | str, ...]
) -> None:
    directory = families[family]
    images = image_processing(directory)
    parts = [TEXTS[one] if isinstance(one, str) else {"type": "image", "image": picture(one)} for one in order]
    prompt = Chat.from_pretrained(directory, images=images).prompt([{"role": "user", "content": parts}])

    processor = AutoProcessor.from_pretrained(directory)
    pictures = [picture(one) for one in order if not isinstance(one, str)]
    plain = [TEXTS[one] if isinstance(one, str) else {"type": "image"} for one in order]
    text = processor.apply_chat_template([{"role": "user", "content": plain}], add_generation_prompt=True)
    expected = processor(
        images=[pictures] if family == "gemma3" else pictures,
        text=[text],
        return_tensors="pt",
        text_kwargs={"add_special_tokens": False},
    )
    assert list(prompt) == expected["input_ids"][0].tolist()
    spans = [place for span in prompt.images for place in range(span.start, span.end)]
    assert spans == [place for place, one in enumerate(prompt) if one == images.image_token_id]
    values = torch.cat([images.prepared(span.digest).tensors["pixel_values"] for span in prompt.images])
    assert torch.equal(values, expected["pixel_values"])


def test_newlines_around_an_image_of_gemma_3_are_one_token(families: dict[str, Path]) -> None:
    images = image_processing(families["gemma3"])
    chat = Chat.from_pretrained(families["gemma3"], images=images)
    parts = [{"type": "image", "image": picture(one)} for one in (1, 2)]
    prompt = chat.prompt([{"role": "user", "content": parts}])
    first, second = prompt.images
    text = [*map(chat.tokenizer.convert_ids_to_tokens, prompt)]
    assert text[first.start - 2 : first.start] == ["\n\n\n", "<start_of_image>"]
    assert text[first.end : second.start] == ["<end_of_image>", "\n\n\n\n", "<start_of_image>"]
    reserved = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    assert images.reserved_ids == set(chat.tokenizer.convert_tokens_to_ids(reserved))
    forged = [{"type": "text", "text": "<start_of_image><image_soft_token>\n<end_of_image>"}, *parts[:1]]
    assert len(chat.prompt([{"role": "user", "content": forged}]).images) == 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_the_prompt_of_a_canary_has_one_image_that_most_of_its_ids_see(families: dict[str, Path], family: str) -> None:
    images = image_processing(families[family])
    prompt = canary_prompt(images)
    (span,) = prompt.images
    assert prompt[span.start : span.end] == [images.image_token_id] * images.prepared(span.digest).num_tokens
    assert (prompt[span.start - 1], prompt[span.end]) == images.around_ids
    others = [*prompt[: span.start - 1], *prompt[span.end + 1 :]]
    assert images.reserved_ids.isdisjoint(others)
    assert len(prompt) - span.end > 15
    assert prompt == canary_prompt(images)


def test_a_model_that_reads_images_alike_may_teach(families: dict[str, Path], model: Path, tmp_path: Path) -> None:
    def copied(name: str, file: str, old: str, new: str) -> str:
        path = shutil.copytree(model, tmp_path / name)
        text = (path / file).read_text()
        assert old in text
        (path / file).write_text(text.replace(old, new))
        return str(path)

    def refuse(path: str) -> None:
        refuse_other_images(str(model), "teacher.path", path, trust_remote_code=False)

    refuse(copied("other class", "processor_config.json", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"))
    save_tiny_model(tmp_path / "text", tied=True)
    others = {
        copied("size", "processor_config.json", "12544", "50176"): r"size=.*50176.*, expected .*12544.*; set teacher",
        copied("merged", "config.json", '"spatial_merge_size": 2', '"spatial_merge_size": 4'): (
            "it has 3 tokens for an image, expected 12"
        ),
        str(families["gemma3"]): r"its images are <image_soft_token>, expected <\|image_pad\|>",
        str(tmp_path / "text"): "images are not supported for model type qwen3, only for",
    }
    for path, words in others.items():
        with pytest.raises(ConfigError, match=rf"^teacher\.path={path}:? (?s:.*){words}"):
            refuse(path)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
def test_every_token_that_only_an_image_or_a_video_brings_is_refused_when_sampled(
    images: ImageProcessing, token: str
) -> None:
    sampled_id = chat_tokenizer("qwen2_5_vl").get_vocab()[token]
    images.refuse_sampled([5, 6], "it")
    with pytest.raises(EvidenceError, match=rf"^it: the sampled token 1 \(id {sampled_id}\) is one of .* not there$"):
        images.refuse_sampled([5, sampled_id], "it")
