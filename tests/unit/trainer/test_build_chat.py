"""Chat templates of a model directory: errors of any kind are typed, and one that does not end is given up."""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path

import pytest

from lockstep.rollout.errors import TemplateError
from lockstep.trainer import build
from lockstep.trainer.config.groups.model_settings import ModelConfig
from tests.fixtures.tokenizers import chat_tokenizer

LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
"""It ends after the test, in its own thread."""


def settings(directory: Path, template: str | None) -> ModelConfig:
    tokenizer = deepcopy(chat_tokenizer("qwen3"))
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return ModelConfig(path=str(directory))


@pytest.mark.parametrize(
    "template",
    [
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x' * 10 ** 18 }}",
        "{{ 10 ** 400 * 1.5 }}",
        "{{ 1 // 0 }}",
        "{{ messages[0]['content'] + 1 }}",
    ],
    ids=["recursion", "memory", "overflow", "division", "type"],
)
def test_a_template_that_fails_is_a_template_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        build.make_chat(settings(tmp_path, template), history="keep")


def test_a_template_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CHAT_LIMIT_S", 1.0)
    started = time.monotonic()
    with pytest.raises(TemplateError, match=r"chat template.* 1 s"):
        build.make_chat(settings(tmp_path, LOOP), history="keep")
    assert time.monotonic() - started < 20


def test_errors_about_the_model_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        build.make_chat(ModelConfig(path=str(tmp_path)), history="keep")
    assert build.make_chat(settings(tmp_path / "model", None), history="keep").stop_token_ids
