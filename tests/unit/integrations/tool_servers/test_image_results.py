"""Images in results of MCP tools: parts of the message for a model that sees images, left out for others."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import pytest
from mcp.types import AudioContent, CallToolResult, ImageContent, TextContent

from lockstep.integrations.environments import mcp as mcp_environment
from lockstep.integrations.environments.mcp import McpEnvironment
from lockstep.integrations.tool_servers.tool_server import ToolCallError, result_content
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.episode.episode import run_episode
from lockstep.rollout.errors import ToolServerError
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.processing import ImageProcessing
from lockstep.rollout.records import Rollout, RolloutStatus
from tests.fixtures.gateway import ScriptedEngine, says
from tests.fixtures.tokenizers import chat_tokenizer
from tests.fixtures.vision import image_processing, picture, save_tiny

PICTURE = picture(1)


def text(of: str) -> TextContent:
    return TextContent(type="text", text=of)


def image(data: bytes | None = None) -> ImageContent:
    if data is None:
        file = io.BytesIO()
        PICTURE.save(file, format="PNG")
        data = file.getvalue()
    return ImageContent(type="image", data=base64.b64encode(data).decode(), mime_type="image/png")


SOUND = AudioContent(type="audio", data="", mime_type="audio/wav")


def result(*blocks: Any, is_error: bool = False) -> CallToolResult:
    return CallToolResult(content=list(blocks), is_error=is_error)


def shown(content: Any) -> Any:
    """Return the content with digests in place of images."""
    return (
        content if isinstance(content, str) else [part.get("text") or image_digest(part["image"]) for part in content]
    )


@pytest.mark.parametrize(
    ("blocks", "without_images", "with_images"),
    [
        ([text("a"), text("b")], "a\nb", "a\nb"),
        (
            [text("a"), image(), text("b"), text("c")],
            "a\nb\nc\n[left out: image; only text can be read]",
            ["a", image_digest(PICTURE), "b", "\nc"],
        ),
        (
            [text("a"), SOUND],
            "a\n[left out: audio; only text can be read]",
            "a\n[left out: audio; only text and images can be read]",
        ),
        (
            [text("a"), image(), SOUND],
            "a\n[left out: audio and image; only text can be read]",
            ["a", image_digest(PICTURE), "[left out: audio; only text and images can be read]"],
        ),
    ],
)
def test_results_are_read_in_their_order(blocks: list[Any], without_images: str, with_images: Any) -> None:
    assert result_content(result(*blocks)) == without_images
    assert shown(result_content(result(*blocks), with_images=True)) == with_images


@pytest.mark.parametrize(
    ("blocks", "with_images", "says"),
    [
        ([image()], False, "the tool returned image, and only text can be read"),
        ([SOUND], True, "the tool returned audio, and only text and images can be read"),
        (
            [text("a"), image(b"no")],
            True,
            "an image: the image cannot be read: cannot identify image file; expected PNG, ",
        ),
    ],
)
def test_results_without_anything_to_read_are_faults_of_the_server(
    blocks: list[Any], with_images: bool, says: str
) -> None:
    with pytest.raises(ToolServerError, match=says):
        result_content(result(*blocks), with_images=with_images)


@pytest.mark.parametrize("with_images", [False, True])
def test_an_error_is_that_of_the_tool(with_images: bool) -> None:
    with pytest.raises(ToolCallError, match=r"^not\ntoday$"):
        result_content(result(text("not"), image(b"no"), text("today"), is_error=True), with_images=with_images)


class Server:
    """Server with one tool, whose results are a text and an image."""

    async def schemas(self) -> list[Mapping[str, Any]]:
        parameters = {"type": "object", "properties": {}}
        return [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}]

    async def call(self, name: str, arguments: Mapping[str, Any], *, with_images: bool = False) -> Any:
        return result_content(result(text("a door"), image()), with_images=with_images)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessing:
    return image_processing(save_tiny("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl")))


async def play(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> tuple[Rollout, ScriptedEngine]:
    """Play an episode in which the model looks once."""
    monkeypatch.setattr(mcp_environment, "tool_server", lambda settings, limits: Server())
    monkeypatch.setattr(McpEnvironment, "tools", ())  # the template of these models shows none
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
    engine = ScriptedEngine(says(chat.tokenizer, call, "a door<|im_end|>"))
    rollout = await run_episode(
        engine=engine,
        chat=chat,
        environment=McpEnvironment(servers={"one": {"url": "http://127.0.0.1:9/mcp"}}),
        example={"prompt": "what is there?"},
        sampling=Sampling(max_tokens=64, stop_token_ids=chat.stop_token_ids),
        max_turns=3,
        rollout_id=0,
        group_id=0,
        seed=0,
    )
    assert rollout.status is RolloutStatus.COMPLETED, rollout.error
    assert rollout.outcome["tool_errors"] == 0
    return rollout, engine


async def test_a_model_that_sees_images_is_shown_those_of_a_tool(
    images: ImageProcessing, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, engine = await play(Chat(chat_tokenizer("qwen2_5_vl"), images=images), monkeypatch)
    assert [[span.digest for span in spans] for spans in engine.images] == [[], [image_digest(PICTURE)]]
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    assert rollout.messages[2]["content"] == [
        {"type": "text", "text": "a door"},
        {"type": "image", "digest": image_digest(PICTURE)},
    ]


async def test_another_model_is_told_that_they_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, engine = await play(Chat(chat_tokenizer("qwen3")), monkeypatch)
    assert engine.images == [(), ()]
    assert rollout.messages[2]["content"] == "a door\n[left out: image; only text can be read]"
