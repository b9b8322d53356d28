"""The start of a teacher: its tokenizer is the student's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.errors import ConfigError
from tests.fixtures.tokenizers import chat_tokenizer
from trainer.config.schema import Config, TeacherConfig
from trainer.engines.teacher_start import refuse_other_tokenizer


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "student")
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "equal")
    other = chat_tokenizer("qwen3")
    other.add_tokens(["<one more>"])
    other.save_pretrained(tmp_path / "other")

    def config(name: str | None) -> Config:
        made = Config(teacher=TeacherConfig(path=None if name is None else str(tmp_path / name)))
        made.model.path = str(tmp_path / "student")
        return made

    refuse_other_tokenizer(config(None))
    refuse_other_tokenizer(config("equal"))
    with pytest.raises(
        ConfigError, match=r"1 tokens differ, such as '<one more>' with id \d+ and None; set teacher.path"
    ):
        refuse_other_tokenizer(config("other"))
