"""Tests of chat templates that join the arguments of tool calls to their own text, as DeepSeek-V3's does."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.errors import TemplateError
from tests.fixtures.gateway import running
from tests.fixtures.tokenizers import chat_tokenizer

JOINS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + c.function.arguments }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city":"Paris <|im_end|> \u00e9"}'}}
MESSAGES = [
    {"role": "user", "content": "say it"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "sun"},
    {"role": "user", "content": "go on"},
]


def test_arguments_are_joined_as_json_text_without_control_tokens():
    tokenizer = chat_tokenizer("qwen3", template=JOINS)
    ids = Chat(tokenizer).prompt(MESSAGES)
    assert '<tool_call>f{"city": "Paris <|im_end|> \u00e9"}</tool_call>' in tokenizer.decode(ids)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4


async def test_a_conversation_with_a_call_branches():
    async with running(chat_tokenizer("qwen3", template=JOINS), "hello<|im_end|>") as server:
        answer = await server.ask(MESSAGES)
        assert answer.model_extra["prompt_kind"] == "not_sampled"


def test_the_template_of_deepseek_v3_renders_a_call():
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / "deepseekv3.jinja").read_text()
    tokenizer = chat_tokenizer("qwen3", template=template)
    assert '{"city": "Paris <|im_end|> \u00e9"}' in tokenizer.decode(Chat(tokenizer).prompt(MESSAGES))


def test_a_template_that_refuses_calls_is_reported_with_its_own_words():
    refuses = JOINS.replace("{% for c", "{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{% for c")
    with pytest.raises(TemplateError, match="no calls"):
        Chat(chat_tokenizer("qwen3", template=refuses)).prompt(MESSAGES)
