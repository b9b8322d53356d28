"""The start of a teacher: its tokenizer is the student's, and its context holds a token more than the longest row."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lockstep.rollout.errors import ConfigError
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.groups.teacher_settings import TeacherConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.engines.teacher_start import _EngineStart, refuse_short, refuse_unfit_teacher
from tests.fixtures.fake_server import KEY, FakeServer
from tests.fixtures.models import tiny_qwen3
from tests.fixtures.tokenizers import chat_tokenizer


def refuse(config: Config) -> None:
    refuse_unfit_teacher(config.teacher, config.model, config.rollout)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "student")
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "equal")
    for name in ("student", "equal", "other"):
        tiny_qwen3(tied=True).config.save_pretrained(tmp_path / name)
    other = AutoTokenizer.from_pretrained(tmp_path / "equal")  # a copy: other tests share the fixture's
    other.add_tokens(["<one more>"])
    other.save_pretrained(tmp_path / "other")

    def config(name: str | None) -> Config:
        made = Config(teacher=TeacherConfig(path=None if name is None else str(tmp_path / name)))
        made.model.path, made.rollout.max_model_len = str(tmp_path / "student"), 64
        return made

    refuse(config(None))
    refuse(config("equal"))
    with pytest.raises(
        ConfigError, match=r"1 tokens differ, such as '<one more>' with id \d+ and None; set teacher.path"
    ):
        refuse(config("other"))


@pytest.mark.parametrize("source", ["model", "policy", "average"])
def test_a_context_without_room_for_the_token_after_the_longest_row_is_refused_before_an_engine_starts(
    source: str, tmp_path: Path
) -> None:
    """Also of the policy as its own teacher, whose engines get that room beside what they sample in."""
    model = tiny_qwen3(tied=True)
    limit = model.config.max_position_embeddings
    model.config.save_pretrained(tmp_path)
    chat_tokenizer("qwen3").save_pretrained(tmp_path)
    config = Config(teacher=TeacherConfig(source=source, path=str(tmp_path) if source == "model" else None))
    config.model.path = str(tmp_path)
    config.rollout.max_model_len = limit - 1
    refuse(config)
    assert config.engine_context == limit - (source != "policy")
    config.rollout.max_model_len = limit
    with pytest.raises(ConfigError, match=rf"context of {limit} tokens .* set rollout.max_model_len={limit - 1} or"):
        refuse(config)


def test_servers_with_a_short_context_can_be_started_with_a_longer_one() -> None:
    refuse_short(512, 513, serves=True)
    with pytest.raises(ConfigError, match=r"=511 or less, or start its servers with rollout\.max_model_len=513"):
        refuse_short(512, 512, serves=True)


def test_servers_of_fewer_images_than_the_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_ENGINE_KEY", KEY)
    tiny_qwen3(tied=True).config.save_pretrained(tmp_path)
    config = Config()
    config.rollout.max_model_len = 48
    config.model.images.max_per_prompt = 2
    server = FakeServer()
    with BackgroundLoop() as loop:
        context = server.running()
        loop.run(context.__aenter__())
        start = _EngineStart(
            settings=TeacherConfig(path=str(tmp_path), urls=[server.url]),
            rollout=config.rollout,
            model=config.model,
            seed=0,
            loop=loop,
            log_path=tmp_path / "log",
            images=None,
        )
        try:
            with pytest.raises(
                ConfigError, match=r"takes 0 images of a prompt, .* serve-engine model\.images\.max_per_prompt=2`"
            ):
                start.members()
            config.model.images.max_per_prompt = 0
            (engine,) = start.members()
            loop.run(engine.close())
        finally:
            loop.run(context.__aexit__(None, None, None))
