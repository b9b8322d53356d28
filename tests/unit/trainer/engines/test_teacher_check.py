"""The check of a teacher's engines against its model in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from lockstep.rollout.errors import EvidenceError
from lockstep.rollout.records import ImageSpan
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.engines import teacher_check
from lockstep.trainer.engines.teacher_check import canary_diff, is_checked
from tests.fixtures.models import sampled_logprobs, tiny_qwen3
from tests.fixtures.vision import full_logprobs, image_processing, picture, save_tiny


class Serving:
    """An engine that serves a model of transformers."""

    name = "the teacher's engine"

    def __init__(self, model: Any) -> None:
        self.model, self.vocab_size = model, model.config.get_text_config().vocab_size

    async def score(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[float]:
        return sampled_logprobs(self.model, tuple(ids[:1]), tuple(ids[1:]))


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    with BackgroundLoop() as loop:
        yield loop


@pytest.fixture
def settings(tmp_path: Path) -> TeacherConfig:
    tiny_qwen3(tied=True).save_pretrained(tmp_path / "teacher")
    return TeacherConfig(path=str(tmp_path / "teacher"))


def served() -> Any:
    return Serving(tiny_qwen3(tied=True))


def test_an_engine_that_computes_the_model_at_the_path_differs_by_rounding_only(
    settings: TeacherConfig, loop: BackgroundLoop
) -> None:
    assert canary_diff(settings, [served(), served()], loop, trust_remote_code=False) < 1e-4


def test_an_engine_that_serves_another_model_is_named(settings: TeacherConfig, loop: BackgroundLoop) -> None:
    other = served()
    other.name = "http://second"
    other.model.get_parameter("model.layers.1.mlp.down_proj.weight").data.mul_(1.5)
    with pytest.raises(EvidenceError, match=r"http://second: its log π of a canary differ by .*at most 0\.01"):
        canary_diff(settings, [served(), other], loop, trust_remote_code=False)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_an_engine_that_sees_another_image_is_named(family: str, tmp_path: Path, loop: BackgroundLoop) -> None:
    directory = save_tiny(family, tmp_path)
    images, settings = image_processing(directory), TeacherConfig(path=str(directory))
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    other = images.store.add(picture(1, 224, 168))

    class Seeing(Serving):
        blind = False

        async def score(self, ids: Sequence[int], spans: Sequence[ImageSpan] = ()) -> list[float]:
            shown = [replace(span, digest=other) if self.blind else span for span in spans]
            return full_logprobs(self.model, images, ids, shown).tolist()

    engine = Seeing(model)
    assert is_checked(settings, trust_remote_code=False, sees_images=True)
    found = canary_diff(settings, [engine], loop, trust_remote_code=False, images=images)  # type: ignore[list-item]
    assert 0 < found < 1e-4
    engine.blind = True
    with pytest.raises(EvidenceError, match="log π of a canary with an image differ by"):
        canary_diff(settings, [engine], loop, trust_remote_code=False, images=images)  # type: ignore[list-item]


def test_an_engine_without_a_number_fails(settings: TeacherConfig, loop: BackgroundLoop) -> None:
    broken = served()
    broken.model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(EvidenceError, match="differ by nan"):
        canary_diff(settings, [broken], loop, trust_remote_code=False)


def test_small_teachers_are_checked_unless_a_setting_says_otherwise(
    settings: TeacherConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_checked(settings, trust_remote_code=False)
    monkeypatch.setattr(teacher_check, "MEMORY_SHARE", 1e-12)
    assert not is_checked(settings, trust_remote_code=False)
    settings.check = True
    assert is_checked(settings, trust_remote_code=False)
    monkeypatch.undo()
    settings.check = False
    assert not is_checked(settings, trust_remote_code=False)
