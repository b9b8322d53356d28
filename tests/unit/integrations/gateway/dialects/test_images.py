"""Tests of images in the requests of every API, with the official clients, over a scripted engine."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from lockstep.integrations.gateway import images as request_images
from lockstep.integrations.gateway.session import Session
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.gateway_settings import GatewaySettings
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.processing import ImageProcessing
from lockstep.rollout.records import RolloutStatus
from lockstep.rollout.sampler.sampler import Sampler
from tests.fixtures.gateway import Running, ScriptedEngine, running, says
from tests.fixtures.tokenizers import chat_tokenizer
from tests.fixtures.vision import image_processing, picture, save_tiny

TOKENIZER = chat_tokenizer("qwen2_5_vl")
FIRST, SECOND, THIRD = picture(1), picture(2, 112, 56), picture(3)
DIGESTS = [image_digest(one) for one in (FIRST, SECOND)]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call><|im_end|>'
TURNS = (CALL, "a door<|im_end|>", "bye<|im_end|>")
LIMIT = GatewaySettings(max_images=2)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessing:
    return image_processing(save_tiny("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl")))


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, format=kind)
    return base64.b64encode(file.getvalue()).decode()


def in_chat(data: str, **extra: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **extra}}


def in_responses(data: str, **extra: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{data}", **extra}


def in_messages(data: str, **extra: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}, **extra}


def recorded(server: Running) -> Session:
    return server.gateway._named["test"]


async def ask(server: Running, messages: list[Any]) -> Any:
    return await server.client_of("test").chat.completions.create(model="policy", messages=messages)


Play = Callable[[Running, Mapping[str, str]], Awaitable[list[str]]]
"""Agent that sends an image, gets a call of a tool, answers with an image, and asks once more. Returns the kinds of the
prompts. Its argument: the encoded images of the second and the third request."""


async def play_chat(server: Running, again: Mapping[str, str]) -> list[str]:
    def opening(data: str) -> Any:
        return {"role": "user", "content": [{"type": "text", "text": "see"}, in_chat(data, detail="high")]}

    first = await ask(server, [opening(encoded(FIRST))])
    turn = first.choices[0].message
    result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": [in_chat(encoded(SECOND))]}
    messages = [opening(again["second"]), turn, result]
    second = await ask(server, messages)
    messages = [opening(again["third"]), *messages[1:], second.choices[0].message, {"role": "user", "content": "go"}]
    third = await ask(server, messages)
    return [answer.model_extra["prompt_kind"] for answer in (first, second, third)]


async def play_responses(server: Running, again: Mapping[str, str]) -> list[str]:
    client = server.client_of("test")

    def opening(data: str) -> Any:
        return {"role": "user", "content": [{"type": "input_text", "text": "see"}, in_responses(data, detail="auto")]}

    async def respond(items: list[Any]) -> Any:
        return await client.responses.create(model="policy", input=items)

    first = await respond([opening(encoded(FIRST))])
    output = [in_responses(encoded(SECOND))]
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": output}
    items = [opening(again["second"]), *first.output, result]
    second = await respond(items)
    third = await respond([opening(again["third"]), *items[1:], *second.output, {"role": "user", "content": "go"}])
    return [answer.model_extra["prompt_kind"] for answer in (first, second, third)]


async def play_previous(server: Running, again: Mapping[str, str]) -> list[str]:
    client = server.client_of("test")

    async def respond(*items: Any, after: Any = None) -> Any:
        return await client.responses.create(model="policy", input=list(items), previous_response_id=after and after.id)

    parts = [{"type": "input_text", "text": "see"}, in_responses(encoded(FIRST))]
    first = await respond({"role": "user", "content": parts})
    output = [in_responses(encoded(SECOND))]
    second = await respond(
        {"type": "function_call_output", "call_id": first.output[0].call_id, "output": output}, after=first
    )
    third = await respond({"role": "user", "content": "go"}, after=second)
    return [answer.model_extra["prompt_kind"] for answer in (first, second, third)]


async def play_messages(server: Running, again: Mapping[str, str]) -> list[str]:
    async with server.anthropic("test") as client:

        def opening(data: str) -> Any:
            image = in_messages(data, cache_control={"type": "ephemeral"})
            return {"role": "user", "content": [{"type": "text", "text": "see"}, image]}

        async def answer(messages: list[Any]) -> Any:
            return await client.messages.create(model="policy", max_tokens=64, messages=messages)

        first = await answer([opening(encoded(FIRST))])
        output = [in_messages(encoded(SECOND))]
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": output}
        messages = [
            opening(again["second"]),
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = await answer(messages)
        more = [{"role": "assistant", "content": second.content}, {"role": "user", "content": "go"}]
        third = await answer([opening(again["third"]), *messages[1:], *more])
    return [message.model_extra["prompt_kind"] for message in (first, second, third)]


PLAYS: Mapping[str, Play] = {
    "chat": play_chat,
    "responses": play_responses,
    "previous response": play_previous,
    "messages": play_messages,
}
RECORDS: dict[str, Any] = {}
"""Records by the name of the play, of which all are equal."""
plays = pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
resends = pytest.mark.parametrize("play", [one for one in PLAYS.values() if one is not play_previous])


@plays
async def test_images_of_the_user_and_of_a_tool_are_sent_to_the_engine_and_extended(
    play: Play, images: ImageProcessing, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    read = request_images.read_image
    monkeypatch.setattr(request_images, "read_image", lambda part, place: decoded.append(place) or read(part, place))
    async with running(TOKENIZER, *TURNS, images=images, settings=LIMIT) as server:
        data = encoded(FIRST)
        assert await play(server, {"second": data, "third": data}) == ["root", "extended", "extended"]
        assert len(decoded) == 2, "each image once, though it is sent with each request"
        calls, conversation = recorded(server).calls, recorded(server).last_conversation
        opening = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": FIRST}]}
        assert server.engine.prompts[0] == tuple(server.chat.prompt([opening]))
        assert [[span.digest for span in spans] for spans in server.engine.images] == [DIGESTS[:1], DIGESTS, DIGESTS]
        for call in calls:
            for span in call.images:
                assert set(call.prompt_ids[span.start : span.end]) == {images.image_token_id}
                assert images.prepared(span.digest).num_tokens == span.end - span.start
        for before, after in itertools.pairwise(calls):
            assert after.prompt_ids[: len(before.all_ids)] == before.all_ids
            assert after.images[: len(before.images)] == before.images
        (row,) = rows_from_calls(calls)
        assert [span.digest for span in row.images] == DIGESTS
        parts = [message["content"] for message in conversation if not isinstance(message["content"], str)]
        assert parts == [
            [{"type": "text", "text": "see"}, {"type": "image", "digest": DIGESTS[0]}],
            [{"type": "image", "digest": DIGESTS[1]}],
        ]
    record = [(call.prompt_ids, call.images, call.sampled_ids) for call in calls]
    assert record == RECORDS.setdefault("first", record), "the same in every API"


@resends
async def test_the_same_picture_in_another_file_is_the_same_and_another_one_branches(
    play: Play, images: ImageProcessing
) -> None:
    async with running(TOKENIZER, *TURNS, images=images, settings=LIMIT) as server:
        kinds = await play(server, {"second": encoded(FIRST, "BMP"), "third": encoded(THIRD)})
        assert kinds == ["root", "extended", "history_edited"]
        assert [span.digest for span in server.engine.images[2]] == [image_digest(THIRD), DIGESTS[1]]


def chat_parts(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def response_parts(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(parts)}]}


def message_parts(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"max_tokens": 8, "messages": [{"role": role, "content": list(parts)}]}


async def send(server: Running, body: Mapping[str, Any]) -> Any:
    """Send a request to the API of its fields."""
    if "max_tokens" in body:
        async with server.anthropic("test") as client:
            return await client.messages.create(model="policy", **body)
    client = server.client_of("test")
    return await (client.responses if "input" in body else client.chat.completions).create(model="policy", **body)


async def refusal(server: Running, body: Mapping[str, Any]) -> str:
    """Return the text of the refusal, in the form of the API."""
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
        await send(server, body)
    error: Any = caught.value.body
    assert error.get("error", error)["type"] == "invalid_request_error"
    assert not server.engine.prompts, "nothing was sampled"
    return str(error.get("error", error)["message"])


DATA = encoded(FIRST)
NO_PICTURE = base64.b64encode(b"not a picture").decode()
ADDRESS = "https://example.com/cat.png"
IN_CHAT: list[tuple[dict[str, Any], str]] = [
    (chat_parts({"type": "image_url", "image_url": {"url": ADDRESS}}), "messages[0].content[0].image_url.url"),
    (chat_parts({"type": "image_url", "image_url": {"url": "/etc/hostname"}}), "send the image as data"),
    (chat_parts({"type": "image_url", "image_url": {"url": 5}}), "expected a data URL, found 5"),
    (chat_parts({"type": "image_url", "image_url": ADDRESS}), 'expected {"url": "data:image/png;base64,..."}'),
    (
        chat_parts({"type": "image_url", "file_id": "file-1"}),
        "content[0].file_id is not supported: the gateway keeps no",
    ),
    (chat_parts(in_chat(DATA, detail="low")), "messages[0].content[0].image_url.detail is not supported: found 'low'"),
    (chat_parts(in_chat("?")), "messages[0].content[0]: the image cannot be read: its data URL is not base64"),
    (
        chat_parts({"type": "text", "text": "a"}, in_chat(NO_PICTURE)),
        "messages[0].content[1]: the image cannot be read",
    ),
    (chat_parts(in_chat(DATA), role="system"), "images are read in messages of the user and in tool results"),
    (chat_parts(in_chat(DATA), role="assistant"), "images are read in messages of the user and in tool results"),
    (chat_parts({"type": "image", "digest": "0" * 64}), "no image has the digest"),
    (chat_parts({"type": "image", "digest": "../secret"}), "no image has the digest"),
    (chat_parts({"type": "image"}), "messages[0].content[0].source: expected an object with a type, found None"),
]
IN_RESPONSES: list[tuple[dict[str, Any], str]] = [
    (response_parts({"type": "input_image", "image_url": ADDRESS}), "input[0].content[0].image_url is not supported"),
    (response_parts({"type": "input_image", "file_id": "file-1"}), "input[0].content[0].file_id is not supported"),
    (response_parts(in_responses(DATA, detail="low")), "input[0].content[0].detail is not supported: found 'low'"),
    (response_parts(in_responses(NO_PICTURE)), "input[0].content[0]: the image cannot be read"),
    (response_parts(in_responses(DATA), role="developer"), "images are read in messages of the user"),
    (response_parts(in_responses(DATA), role="assistant"), "images are read in messages of the user"),
    (
        {"input": [{"type": "function_call_output", "call_id": "1", "output": [in_responses(NO_PICTURE)]}]},
        "input[0].output[0]: the image cannot be read",
    ),
]
IN_MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        message_parts({"type": "image", "source": {"type": "url", "url": ADDRESS}}),
        "messages[0].content[0].source.type is not supported: found 'url', expected 'base64': nothing is fetched; send",
    ),
    (message_parts({"type": "image", "source": {"type": "file", "file_id": "1"}}), "found 'file', expected 'base64'"),
    (message_parts({"type": "image", "source": {"type": "base64"}}), "source.data: expected base64, found None"),
    (message_parts(in_messages(NO_PICTURE)), "messages[0].content[0]: the image cannot be read"),
    (message_parts(in_messages(DATA), role="system"), "images are read in messages of the user"),
    (message_parts(in_messages(DATA), role="assistant"), "images are read in messages of the user"),
    (
        message_parts({"type": "tool_result", "tool_use_id": "1", "content": [in_messages("?")]}),
        "messages[0].content[0].content[0]: the image cannot be read: its data URL is not base64",
    ),
    ({**message_parts("x"), "system": [in_messages(DATA)]}, "images are read in messages of the user"),
]


@pytest.mark.parametrize(("body", "says"), [*IN_CHAT, *IN_RESPONSES, *IN_MESSAGES])
async def test_images_that_are_not_data_or_cannot_be_read_are_refused(
    body: dict[str, Any], says: str, images: ImageProcessing
) -> None:
    async with running(TOKENIZER, "yes<|im_end|>", images=images, settings=LIMIT) as server:
        text = await refusal(server, body)
        assert says in text
        assert " object at " not in text
        assert "test" not in server.gateway._named, "no session was opened"


ONE_OF_EACH = [chat_parts(in_chat(DATA)), response_parts(in_responses(DATA)), message_parts(in_messages(DATA))]
DIGEST: dict[str, Any] = {"type": "image", "digest": DIGESTS[0]}


@pytest.mark.parametrize(
    "body", [*ONE_OF_EACH, *(parts(DIGEST) for parts in (chat_parts, response_parts, message_parts))]
)
async def test_a_model_without_images_names_the_setting(body: dict[str, Any]) -> None:
    async with running(TOKENIZER, "yes<|im_end|>") as server:
        assert "with model.images.max_per_prompt above 0" in await refusal(server, body)


@pytest.mark.parametrize(
    ("parts", "image"), [(chat_parts, in_chat), (response_parts, in_responses), (message_parts, in_messages)]
)
async def test_more_images_than_the_limit_are_refused_and_the_session_goes_on(
    parts: Callable[..., dict[str, Any]], image: Callable[..., dict[str, Any]], images: ImageProcessing
) -> None:
    async with running(TOKENIZER, "yes<|im_end|>", images=images, settings=LIMIT) as server:
        text = await refusal(server, parts(*[image(DATA)] * 3))
        assert "has 3 images, and the model reads at most 2 in one prompt" in text
        assert "model.images.max_per_prompt" in text
        await send(server, parts(*[image(DATA)] * 2))
        assert recorded(server).failure is None
        assert [len(spans) for spans in server.engine.images] == [2]


async def test_images_before_a_previous_response_count_too(images: ImageProcessing) -> None:
    async with running(TOKENIZER, "yes<|im_end|>", images=images, settings=LIMIT) as server:
        first = await send(server, response_parts(*[in_responses(DATA)] * 2))
        with pytest.raises(openai.BadRequestError, match="has 3 images") as caught:
            await send(server, {**response_parts(in_responses(DATA)), "previous_response_id": first.id})
        assert caught.value.code == "too_many_images"
        assert recorded(server).refusal == "too_many_images"
        assert recorded(server).failure is None


async def test_an_agent_that_ends_at_the_limit_keeps_its_samples(images: ImageProcessing) -> None:
    async def agent(base_url: str, api_key: str, example: dict[str, Any]) -> None:
        messages: list[Any] = []
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            while True:
                messages.append({"role": "user", "content": [*example["images"], in_chat(DATA)]})
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages.append(answer.choices[0].message)

    row = {"question": "?", "images": [{"type": "image", "digest": images.store.add(THIRD)}]}
    chat = Chat(TOKENIZER, images=images)
    sampler = Sampler(
        engine=ScriptedEngine(says(TOKENIZER, "yes<|im_end|>")),
        chat=chat,
        make_environment=partial(make_environment, "agent", agent=agent),
        max_turns=8,
        seed=1,
        gateway=GatewaySettings(max_images=5),
    )
    sampling = Sampling(max_tokens=8, stop_token_ids=chat.stop_token_ids)
    (rollout,) = await sampler.collect([row], samples_per_prompt=1, sampling=sampling, step=0)
    assert rollout.status is RolloutStatus.CONTEXT_FULL, rollout.error
    assert rollout.is_trainable
    assert [len(call.images) for call in rollout.calls] == [2, 4]


@pytest.mark.parametrize("parts", [chat_parts, response_parts, message_parts])
async def test_an_image_of_a_data_row_is_sent_by_its_digest(
    parts: Callable[..., dict[str, Any]], images: ImageProcessing
) -> None:
    digest = images.store.add(THIRD)
    async with running(TOKENIZER, "yes<|im_end|>", images=images, settings=LIMIT) as server:
        await send(server, parts({"type": "image", "digest": digest}))
        assert [span.digest for span in server.engine.images[0]] == [digest]


async def test_counts_of_tokens_are_those_of_the_prompt(images: ImageProcessing) -> None:
    async with running(TOKENIZER, "yes<|im_end|>", images=images, settings=LIMIT) as server:
        messages: Any = message_parts(in_messages(DATA))["messages"]
        async with server.anthropic() as client:
            counted = await client.messages.count_tokens(model="policy", messages=messages)
        tokens = await server.client.post("/tokenize", body=chat_parts(in_chat(DATA)), cast_to=dict[str, Any])
        await send(server, chat_parts(in_chat(DATA)))
        assert tuple(tokens["tokens"]) == server.engine.prompts[0]
        assert counted.input_tokens == len(server.engine.prompts[0]) > images.prepared(DIGESTS[0]).num_tokens


async def test_ids_that_stand_for_images_are_refused_without_them(images: ImageProcessing) -> None:
    async with running(TOKENIZER, "yes<|im_end|>", images=images, settings=LIMIT) as server:
        client = server.client_of("test")
        with pytest.raises(openai.BadRequestError, match="tokens that stand for images"):
            await client.completions.create(model="policy", prompt=[5, images.image_token_id])
        await client.completions.create(model="policy", prompt=[5, 6])
        assert recorded(server).failure is None


async def test_texts_beside_each_other_are_one(images: ImageProcessing) -> None:
    async with running(TOKENIZER, "yes<|im_end|>", images=images, settings=LIMIT) as server:
        texts = [{"type": "text", "text": text} for text in ("a", "b", "c")]
        await send(server, chat_parts(*texts[:2], in_chat(DATA), texts[2]))
        (content,) = [message["content"] for message in recorded(server).last_conversation if message["role"] == "user"]
        assert [part.get("text") for part in content] == ["ab", None, "c"]
