"""Extensions with the chat templates of many model families: no new message is lost, moved or read as control tokens.

The templates are those in TRL's package, of published models. Their tokenizers have one id per byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import TemplateError
from lockstep.rollout.records import EngineCall
from tests.fixtures.conversations import USER, WEATHER, a_call, controls_in, encoded
from tests.fixtures.tokenizers import byte_tokenizer_of, chat_tokenizer, shipped_templates

SHIPPED = shipped_templates()
TEXT_ONLY = {"idefics3", "llava_next", "smolvlm"}
"""Templates that show images and parts of text, but no content that is a string."""


def calls(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
        for i in range(count)
    ]


def results(count: int, text: str) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": f"abcdefgh{i}", "content": f"{text} no {i}"} for i in range(count)]


def turn(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **fields}


def scenarios(text: str) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return turns and the messages that follow them; `text` is part of each new message."""
    user, system = {"role": "user", "content": f"go on {text}"}, {"role": "system", "content": f"speak Latin {text}"}
    return {
        "a user": (turn(content="fine"), [user]),
        "a user after reasoning": (turn(content="fine", reasoning_content="hm"), [user]),
        "a system message": (turn(content="fine"), [system]),
        "a system message and a user": (turn(content="fine"), [system, user]),
        "a user and a system message": (turn(content="fine"), [user, system]),
        "a result": (turn(tool_calls=calls(1)), results(1, text)),
        "a result after content": (turn(content="let me see", tool_calls=calls(1)), results(1, text)),
        "a result after reasoning": (turn(reasoning_content="hm", tool_calls=calls(1)), results(1, text)),
        "a result without a call": (turn(content="fine"), [{**results(1, text)[0], "name": "get_weather"}]),
        "two results": (turn(tool_calls=calls(2)), results(2, text)),
        "two results and a user": (turn(tool_calls=calls(2)), [*results(2, text), user]),
        "two results and a system message": (turn(tool_calls=calls(2)), [*results(2, text), system]),
    }


def extension(
    chat: Chat, said: Mapping[str, Any], new: Sequence[Mapping[str, Any]]
) -> tuple[EngineCall, list[int] | None]:
    end = next(token for token in reversed(chat.stop_token_ids))
    call = a_call(chat.prompt([USER], [WEATHER]), [*encoded(chat.tokenizer, "sampled"), end])
    return call, chat.extend(call, [USER, said], new, [WEATHER])


@pytest.mark.parametrize("name", SHIPPED)
def test_each_new_message_stands_in_an_extension_once_and_in_order(name: str) -> None:
    tokenizer = byte_tokenizer_of(SHIPPED[name])
    try:
        chat = Chat(tokenizer)
    except TemplateError:
        assert name.removesuffix("_training") in TEXT_ONLY
        return
    spelled = " ".join(sorted(tokenizer.added_tokens_decoder[i].content for i in tokenizer.added_tokens_decoder))
    for case, (said, new) in scenarios(f"{spelled} really").items():
        call, extended = extension(chat, said, new)
        if extended is None:
            continue
        assert tuple(extended[: len(call.all_ids)]) == call.all_ids, case
        glue = tokenizer.decode(extended[len(call.all_ids) :])
        where = [glue.find(message["content"]) for message in new]
        assert -1 not in where, case
        assert where == sorted(where), case
        harmless, extended_harmless = extension(chat, said, scenarios("<really")[case][1])
        assert extended_harmless is not None, case
        assert controls_in(tokenizer, extended) == controls_in(tokenizer, extended_harmless), case
        assert harmless == call


SYSTEM = {"a system message", "a system message and a user", "a user and a system message"}
RESULTS = {
    "a result",
    "a result after content",
    "a result after reasoning",
    "two results",
    "two results and a user",
    "two results and a system message",
}
BRANCHES = {
    "cohere2": SYSTEM | RESULTS | {"a result without a call"},
    "deepseekv3": SYSTEM | {"two results and a system message"},
    "gemma3": RESULTS | {"a result without a call", "a system message", "a system message and a user"},
    "gemma4_v5": RESULTS | {"a result without a call"},
    "glm4moe": set(),
    "gptoss": SYSTEM | {"two results and a system message", "a result without a call"},
    "lfm2_v2": set(),
    "llama3_2": set(),
    "nemotron_3_nano": set(),
    "phi3_5": RESULTS | {"a result without a call"},
    "qwen2_5": set(),
    "qwen3": set(),
    "qwen3_instruct_2507": set(),
    "qwen3_8": SYSTEM | {"two results and a system message"},
}
"""Scenarios that branch: the template moves the message, drops it, refuses it, or does not close a turn with calls."""


@pytest.mark.parametrize("name", BRANCHES)
def test_a_conversation_branches_only_where_the_template_does_not_append_the_message(name: str) -> None:
    chat = Chat(byte_tokenizer_of(SHIPPED[name]))
    branches = {case for case, (said, new) in scenarios("x").items() if extension(chat, said, new)[1] is None}
    assert branches == BRANCHES[name]


def test_a_dummy_without_calls_proves_nothing_where_the_template_accepts_calls() -> None:
    """The result of a call is shown only right after it, so a dummy without the call would lose the result."""
    template = (
        "{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{{ '[' + m.content + ']' if messages[loop.index0 - 1].tool_calls else '(no call)' }}"
        "{%- else %}{{ '<|im_start|>' + m.role + m.content }}"
        "{%- for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) + '!' }}{%- endfor %}"
        "{{ '' if m.tool_calls else '<|im_end|>' }}{%- endif %}{%- endfor %}"
    )
    chat = Chat(chat_tokenizer("chatml", template=template))
    for said in (turn(tool_calls=calls(1)), turn(content="fine")):
        assert extension(chat, said, results(1, "sun"))[1] is None


@pytest.mark.parametrize("name", ["glm4moe", "glm4moe_training"])
def test_a_stop_token_that_opens_the_next_message_is_doubled_only_if_another_was_sampled(name: str) -> None:
    """GLM-4.5's generation config ends turns by the tokens that open the next message."""
    tokenizer = byte_tokenizer_of(SHIPPED[name])
    stops = {text: tokenizer.convert_tokens_to_ids(text) for text in ("<|user|>", "<|observation|>", "<eos>")}
    chat = Chat(tokenizer, stop_token_ids=list(stops.values()))
    prompt = chat.prompt([USER], [WEATHER])

    def glue(stop: str, said: Mapping[str, Any], new: Sequence[Mapping[str, Any]]) -> str:
        call = a_call(prompt, [*encoded(tokenizer, "fine"), stops[stop]])
        extended = chat.extend(call, [USER, said], new, [WEATHER])
        assert extended is not None
        return tokenizer.decode(extended[len(call.all_ids) - 1 :])

    result = (turn(tool_calls=calls(1)), results(1, "sun"))
    shown = "\n<tool_response>\nsun no 0\n</tool_response><|assistant|>"
    assert glue("<|observation|>", *result) == f"<|observation|>{shown}"
    question = (turn(content="fine"), [{"role": "user", "content": "more"}])
    assert glue("<|user|>", *question) == "<|user|>\nmore<|assistant|>"
    if name == "glm4moe":  # TRL's version closes a turn with the tokens instead
        assert glue("<eos>", *result) == f"<eos><|observation|>{shown}"
        assert glue("<eos>", *question) == "<eos><|user|>\nmore<|assistant|>"
        assert glue("<|observation|>", *question) == "<|observation|><|user|>\nmore<|assistant|>"


def test_text_that_a_template_trims_or_quotes_is_found_in_the_extension() -> None:
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + "
        "(m.content | trim if m.role == 'user' else m.content | tojson) + '<|im_end|>\n' }}{%- endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
    )
    chat = Chat(chat_tokenizer("chatml", template=template))
    new = [{"role": "tool", "content": '"a"\n<|im_end|>'}, {"role": "user", "content": " \n go  on \n"}]
    call, extended = extension(chat, turn(content="fine"), new)
    assert extended is not None
    assert chat.decode(extended[len(call.all_ids) :]) == (
        '\n<|im_start|>tool\n"\\"a\\"\\n<|im_end|>"<|im_end|>\n<|im_start|>user\ngo  on<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "shown", ["m.content[:9]", "m.content | upper", "'x' if m.content | length > 12 else m.content"]
)
def test_a_conversation_branches_where_a_template_shows_a_part_of_the_text(shown: str) -> None:
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + (m.content if m.role != 'tool' else " + shown + ") }}"
        "{{ '<|im_end|>' }}{%- endfor %}"
    )
    chat = Chat(chat_tokenizer("chatml", template=template))
    assert extension(chat, turn(content="fine"), [{"role": "tool", "content": "a long result"}])[1] is None


def test_the_calls_of_a_new_assistant_message_are_part_of_its_text() -> None:
    shows = "{%- for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}{%- endfor %}"
    template = "{%- for m in messages %}{{ '<|im_start|>' + m.content }}#{{ '<|im_end|>' }}{%- endfor %}"
    new = [turn(content="a few shot", tool_calls=calls(1)), *results(1, "sun")]
    for text, extends in ((shows, True), ("", False)):
        chat = Chat(chat_tokenizer("chatml", template=template.replace("#", text)))
        assert (extension(chat, turn(content="fine"), new)[1] is not None) is extends


def test_a_message_that_the_template_drops_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    for name, new, reports in (("phi3_5", results(2, "sun"), 1), ("cohere2", scenarios("x")["a system message"][1], 0)):
        chat = Chat(byte_tokenizer_of(SHIPPED[name]))
        caplog.clear()
        for _ in range(2):
            assert extension(chat, turn(content="fine"), new)[1] is None
        assert len(caplog.records) == reports, name
        assert all("drops a message of role 'tool'" in record.message for record in caplog.records)


TOOLS_BEFORE_LAST_USER = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools and m == users[-1] %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{ '[RESULT]' + m.content + '[/RESULT]' }}"
    "{%- else %}{{ ' ' + m.content + (m.tool_calls | tojson if m.tool_calls else '') + '<eos>' }}{%- endif %}"
    "{%- endfor %}"
)
"""The tools stand before the last user turn only, as in the template of Mistral 7B v0.3."""


def test_a_tool_list_that_moves_with_the_last_user_turn_is_not_repeated() -> None:
    tokenizer = byte_tokenizer_of(TOOLS_BEFORE_LAST_USER)
    chat, follow = Chat(tokenizer), Chat(tokenizer, history="template")
    ids = chat.prompt([USER], [WEATHER])
    messages: list[Mapping[str, Any]] = [USER]
    for number in range(3):
        call = a_call(ids, [*encoded(tokenizer, " fine"), tokenizer.eos_token_id])
        messages.append(chat.parse(call.sampled_ids, [WEATHER]))
        new = [{"role": "user", "content": f"get_weather {number}"}]
        extended = chat.extend(call, messages, new, [WEATHER])
        assert extended is not None
        assert tokenizer.decode(extended[len(call.all_ids) :]) == f"[INST] get_weather {number}[/INST]"
        assert follow.extend(call, messages, new, [WEATHER]) is None
        ids, messages = extended, messages + new
    assert tokenizer.decode(ids).count("[TOOLS]") == 1


def test_a_tool_list_that_the_prompt_does_not_hold_is_shown() -> None:
    tokenizer = byte_tokenizer_of(TOOLS_BEFORE_LAST_USER)
    chat = Chat(tokenizer)
    call = a_call(chat.prompt([USER]), [*encoded(tokenizer, " fine"), tokenizer.eos_token_id])
    extended = chat.extend(call, [USER, chat.parse(call.sampled_ids)], [USER], [WEATHER])
    assert extended is not None
    assert tokenizer.decode(extended).count("[TOOLS]") == 1


PIECES = ("", "\n", "\n\n", " ", "a", "<|im_end|>\n", "<|im_start|>", "<|im_start|>system\n", "[", "]\n", "# Tools\n\n")
"""Texts around a tool list, alike with those around turns."""


def toy_template(before: str, after: str, opening: str, closing: str) -> str:
    """Return a template that shows the tools before the last user turn."""
    return (
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{%- for m in messages %}"
        f"{{%- if tools and m == users[-1] %}}{{{{ {before!r} + (tools | tojson) + {after!r} }}}}{{%- endif %}}"
        f"{{{{ {opening!r} + m.role + '\n' + m.content + {closing!r} }}}}"
        "{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{ {opening!r} + 'assistant\n' }}}}{{%- endif %}}"
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    before=st.lists(st.sampled_from(PIECES), max_size=2).map("".join),
    after=st.lists(st.sampled_from(PIECES), max_size=2).map("".join),
    closing=st.sampled_from(["<|im_end|>\n", "<|im_end|>", "<|im_end|>\n\n", "<|im_end|>]\n"]),
    is_known=st.booleans(),
)
@example(before="<|im_start|>system\n", after="<|im_end|>\n", closing="<|im_end|>\n", is_known=True)
def test_a_tool_list_is_shown_once_wherever_the_text_around_it_repeats(
    before: str, after: str, closing: str, is_known: bool
) -> None:
    tokenizer = chat_tokenizer("chatml", template=toy_template(before, after, "<|im_start|>", closing))
    chat = Chat(tokenizer)
    ids = chat.prompt([USER], [WEATHER] if is_known else [])
    messages: list[Mapping[str, Any]] = [USER]
    for number in range(3):
        call = a_call(ids, encoded(tokenizer, "fine<|im_end|>"))
        messages.append(chat.parse(call.sampled_ids, [WEATHER]))
        new = [{"role": "user", "content": f"get_weather {number}"}]
        extended = chat.extend(call, messages, new, [WEATHER])
        assert extended is not None
        ids, messages = extended, messages + new
        assert tokenizer.decode(ids).count('"description"') == str(WEATHER).count("'description'")
