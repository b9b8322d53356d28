"""Places of images in a prompt: where they stand, and numbers that do not agree."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.errors import DataError

A, B, C = ({"type": "image", "digest": letter * 64} for letter in "abc")
PLACE = {"type": "image"}


def text(of: str) -> dict[str, Any]:
    return {"type": "text", "text": of}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def read(images: list[Any], reader: PromptReader | None = None, **row: Any) -> list[Any]:
    """Return the messages of a row, read once, and once more as a row of messages."""
    messages = (reader or PromptReader()).messages({**row, "images": images})
    again = PromptReader(column="messages").messages({"messages": list(messages), "images": images})
    assert again == messages, "placed images stay where they are"
    return list(messages)


def test_images_without_a_place_stand_before_the_text_of_the_first_user_turn() -> None:
    assert read([A, B], prompt="what?") == [user([A, B, text("what?")])]
    few_shot = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    system = {"role": "system", "content": "s"}
    assert read([A], messages=[system, *few_shot]) == [system, user([A, text("a")]), *few_shot[1:]]
    assert read([A], messages=[user([text("a"), text("b")])]) == [user([A, text("a"), text("b")])]
    assert read([A], messages=[{"role": "user", "content": ""}, user("b")]) == [user([A]), user("b")]


def test_parts_without_a_value_are_filled_in_order() -> None:
    messages = [
        user([PLACE, text("a"), {**PLACE, "image": None, "text": None}]),
        {"role": "tool", "content": [PLACE]},
        user("c"),
    ]
    expected = [user([A, text("a"), B]), {"role": "tool", "content": [C]}, user("c")]
    assert read([A, B, C], messages=messages) == expected


def test_markers_are_replaced_in_order_and_the_text_around_them_is_kept() -> None:
    assert read([A, B], prompt=" <image>\n x <image><b> ") == [
        user([text(" "), A, text("\n x "), B, text("<b> ")]),
    ]
    assert read([A, B], prompt="<image><image>") == [user([A, B])]
    messages = [
        user([text("a <image>"), text("b")]),
        {"role": "assistant", "content": "<image>"},
        user("<image>c"),
    ]
    assert read([A, B], messages=messages) == [
        user([text("a "), A, text("b")]),
        {"role": "assistant", "content": "<image>"},
        user([B, text("c")]),
    ]


def test_parts_with_a_value_are_taken_as_they_are() -> None:
    messages = [user([A, text("<image> a"), B])]
    assert read([], messages=messages) == messages
    assert read([A, B], messages=messages) == messages, "the column lists the images of the messages"
    mixed = [user([A, PLACE])]
    assert read([B], messages=mixed) == [user([A, B])]


def test_a_marker_in_a_row_without_images_stays_text() -> None:
    for images in ({}, {"images": []}, {"images": None}):
        assert PromptReader().messages({"prompt": "a <image> tag", **images}) == (user("a <image> tag"),)


def test_system_prompt_and_template_are_kept() -> None:
    reader = PromptReader(system="Mind the <image>.", template="Q: {prompt}\nA:")
    system = {"role": "system", "content": "Mind the <image>."}
    assert read([A], reader, prompt="x") == [system, user([A, text("Q: x\nA:")])]
    assert read([A], reader, prompt="x<image>") == [system, user([text("Q: x"), A, text("\nA:")])]
    assert read([A], PromptReader(template="<image>{prompt}"), prompt="x") == [user([A, text("x")])]


@pytest.mark.parametrize(
    ("images", "row", "words"),
    [
        ([A], {"prompt": "<image><image>"}, r"in the prompt: 2 \(<image> in its text\), images in column images: 1;"),
        ([A, B], {"prompt": "<image>"}, r"in the prompt: 1 \(<image> in its text\), images in column images: 2;"),
        (
            [],
            {"messages": [user([PLACE])]},
            r"in the prompt: 1 \(parts .* without a value\), images in column",
        ),
        ([A, B], {"messages": [user([PLACE, text("<image>")])]}, r"prompt: 1 \(parts .*, images in column images: 2"),
        ([B], {"messages": [user([A])]}, "images in the messages: 1, in column images: 1, for which there is no place"),
        ([B, A], {"messages": [user([A, B])]}, "images in the messages: 2, in column images: 2, for which"),
        ([A], {"messages": [{"role": "system", "content": "s"}]}, "has no user turn that could show the images"),
    ],
)
def test_numbers_that_do_not_agree_are_refused(images: list[Any], row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        PromptReader().messages({**row, "images": images})
