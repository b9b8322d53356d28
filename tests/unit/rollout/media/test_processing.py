from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from lockstep.rollout.errors import ConfigError, DataError, TemplateError
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.processing import ImageProcessing, image_parts
from lockstep.rollout.media.store import ImageStore
from tests.fixtures.models import save_tiny_model
from tests.fixtures.vision import image_processing, picture, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen2_5_vl")
    save_tiny("qwen2_5_vl", directory)
    return directory


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
