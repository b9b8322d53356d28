"""Extensions: the next prompt is the sampled ids and the new messages; a sampled turn is never tokenized again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.records import FinishReason
from tests.fixtures.conversations import FAMILIES, USER, WEATHER, a_call, controls_in, encoded, hostile_text, rendered
from tests.fixtures.tokenizers import chat_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_an_extension_reads_like_the_rendered_conversation(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    chat = Chat(tokenizer)
    prompt = chat.prompt([USER])
    opener = "<|channel|>final<|message|>" if family == "gpt_oss_like" else ""
    sampled = [*encoded(tokenizer, f"{opener}it is sunny"), tokenizer.eos_token_id]
    message = chat.parse(sampled)
    assert message["content"] == "it is sunny"
    more = [{"role": "user", "content": "and in Rome?"}]
    extended = chat.extend(a_call(prompt, sampled), [USER, message], more)
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    whole = rendered(tokenizer, [USER, message, *more])
    # Harmony rewrites <|return|> once a conversation goes on; what was sampled stays.
    assert tokenizer.decode(extended).replace("<|return|>", "<|end|>") == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_cut_by_length_gets_its_closing_token_and_one_that_ended_does_not(family: str) -> None:
    tokenizer = chat_tokenizer(family)
    chat = Chat(tokenizer)
    prompt = chat.prompt([USER])
    text = encoded(tokenizer, "<|channel|>final<|message|>sunny" if family == "gpt_oss_like" else "sunny")
    more = [{"role": "user", "content": "go on"}]
    ended = chat.extend(
        a_call(prompt, [*text, tokenizer.eos_token_id]), [USER, {"role": "assistant", "content": "sunny"}], more
    )
    cut = chat.extend(
        a_call(prompt, text, FinishReason.LENGTH), [USER, {"role": "assistant", "content": "sunny"}], more
    )
    assert ended is not None
    assert cut is not None
    where = len(prompt) + len(text)
    assert cut[:where] == ended[:where] == [*prompt, *text]
    assert cut[where + 1 :] == ended[where + 1 :]
    closing = tokenizer.convert_ids_to_tokens(cut[where])
    assert closing == {"llama3": "<|eot_id|>", "gpt_oss_like": "<|end|>"}.get(family, "<|im_end|>")
    assert chat.stop_token_ids[0] == tokenizer.eos_token_id


def test_inserted_closing_tokens_are_not_trained() -> None:
    tokenizer = chat_tokenizer("qwen3")
    chat = Chat(tokenizer)
    first = a_call(chat.prompt([USER]), encoded(tokenizer, "cut short"), FinishReason.LENGTH)
    history = [USER, chat.parse(first.sampled_ids)]
    extended = chat.extend(first, history, [{"role": "user", "content": "go on"}])
    assert extended is not None
    second = a_call(extended, [*encoded(tokenizer, "done"), tokenizer.eos_token_id])
    (row,) = rows_from_calls([first, second])
    assert row.ids[row.loss_mask].tolist() == [*first.sampled_ids, *second.sampled_ids]


def test_a_stop_token_other_than_the_templates_is_not_followed_by_a_second_terminator() -> None:
    tokenizer = chat_tokenizer("chatml")
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    chat = Chat(tokenizer, stop_token_ids=[end_of_text])
    assert chat.stop_token_ids == (tokenizer.eos_token_id, end_of_text)
    prompt = chat.prompt([USER])
    sampled = [*encoded(tokenizer, "sunny"), end_of_text]
    extended = chat.extend(a_call(prompt, sampled), [USER, chat.parse(sampled)], [USER])
    assert extended is not None
    assert controls_in(tokenizer, extended[len(prompt) :])[:2] == ["<|endoftext|>", "<|im_start|>"]


@pytest.mark.parametrize(
    "pieces",
    [pytest.param(["_Ski", "nny"], id="would merge"), pytest.param(["_S", "kin", "ny"], id="would split elsewhere")],
)
def test_sampled_tokens_are_kept_where_tokenizing_their_text_again_would_change_them(pieces: list[str]) -> None:
    """NeMo Gym docs, "On-Policy Corrections", problem 1."""
    tokenizer = chat_tokenizer("chatml")
    chat = Chat(tokenizer)
    sampled = [token for piece in pieces for token in encoded(tokenizer, piece)] + [tokenizer.eos_token_id]
    assert encoded(tokenizer, tokenizer.decode(sampled)) != sampled
    prompt = chat.prompt([USER])
    extended = chat.extend(a_call(prompt, sampled), [USER, chat.parse(sampled)], [USER])
    assert extended is not None
    assert extended[len(prompt) : len(prompt) + len(sampled)] == sampled


def test_invalid_utf8_is_kept_as_ids() -> None:
    tokenizer = chat_tokenizer("qwen3")
    chat = Chat(tokenizer)
    half_a_character = encoded(tokenizer, "é")[:1]
    prompt = chat.prompt([USER])
    message = chat.parse(half_a_character)
    assert message["content"] == "\ufffd"
    extended = chat.extend(a_call(prompt, half_a_character, FinishReason.LENGTH), [USER, message], [USER])
    assert extended is not None
    assert extended[len(prompt)] == half_a_character[0]


def test_a_tool_call_written_differently_than_the_template_would_is_kept_as_sampled() -> None:
    """NeMo Gym docs, "On-Policy Corrections", problem 2: a template cannot reproduce how a model spaces its calls."""
    tokenizer = chat_tokenizer("qwen3")
    for history in ("keep", "template"):
        chat = Chat(tokenizer, history=history)
        prompt = chat.prompt([USER], [WEATHER])
        text = '<tool_call>{"arguments":{"city":"Paris"},  "name":"get_weather"}</tool_call>'
        sampled = [*encoded(tokenizer, text), tokenizer.eos_token_id]
        message = chat.parse(sampled, [WEATHER])
        answer = {"role": "tool", "content": "sunny", "tool_call_id": message["tool_calls"][0]["id"]}
        extended = chat.extend(a_call(prompt, sampled), [USER, message], [answer], [WEATHER])
        assert extended is not None
        assert tokenizer.decode(extended[len(prompt) :]) == (
            f"{text}<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


@pytest.mark.parametrize("family", ["chatml", "qwen3", "llama3"])
@settings(max_examples=60, deadline=None)
@given(hostile=hostile_text)
def test_a_tool_result_cannot_add_a_control_token_to_an_extension(family: str, hostile: str) -> None:
    tokenizer = chat_tokenizer(family)
    chat = Chat(tokenizer)
    call = a_call(chat.prompt([USER]), [*encoded(tokenizer, "ok"), tokenizer.eos_token_id])
    history = [USER, chat.parse(call.sampled_ids)]

    def extended(text: str) -> list[int]:
        ids = chat.extend(call, history, [{"role": "tool", "content": text, "name": "f"}])
        assert ids is not None
        return ids

    assert controls_in(tokenizer, extended(hostile)) == controls_in(tokenizer, extended("x"))


def test_parallel_tool_results_carry_the_name_of_their_own_tool() -> None:
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\n' + m.content }}"
        "{%- for c in m.tool_calls or [] %}{{ '[' + c.function.name + (c.function.arguments | tojson) + ']' }}"
        "{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )
    tokenizer = chat_tokenizer("qwen3", template=template)
    chat = Chat(tokenizer)
    text = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("left", "right"))
    sampled = [*encoded(tokenizer, text), tokenizer.eos_token_id]
    message = chat.parse(sampled)
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    answers = [{"role": "tool", "content": str(n), "tool_call_id": ids[n]} for n in (1, 0)]
    prompt = chat.prompt([USER])
    extended = chat.extend(a_call(prompt, sampled), [USER, message], answers)
    assert extended is not None
    glue = tokenizer.decode(extended[len(prompt) + len(sampled) :])
    assert glue == "\n<|im_start|>tool right\n1<|im_end|>\n<|im_start|>tool left\n0<|im_end|>\n<|im_start|>assistant\n"


def test_parallel_results_extend_where_the_template_refuses_parallel_calls() -> None:
    tokenizer = chat_tokenizer("llama3")
    chat = Chat(tokenizer)
    text = '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
    sampled = [*encoded(tokenizer, text), tokenizer.eos_token_id]
    message = chat.parse(sampled, [WEATHER])
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["a", "b"]
    results = [{"role": "tool", "content": content} for content in ("1", "2")]
    extended = chat.extend(a_call(chat.prompt([USER]), sampled), [USER, message], results)
    assert extended is not None
    assert tokenizer.decode(extended).count("<|start_header_id|>ipython<|end_header_id|>") == 2


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{%- for m in messages %}{{ m.role + ': ' + (m.content if loop.last else m.content[:3]) + '<|im_end|>' }}"
            "{%- endfor %}",
            "the turn is shortened when messages follow",
        ),
        (
            "{%- for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{%- endfor %}{{ 'END' }}",
            "text after the last turn disappears when messages follow",
        ),
        (
            "{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{%- endif %}"
            "{{ '<|im_start|>' + m.content + '<|im_end|>' }}{%- endfor %}",
            "the template refuses the new message",
        ),
    ],
)
def test_an_extension_that_cannot_be_proven_branches(template: str, why: str) -> None:
    tokenizer = chat_tokenizer("chatml", template=template)
    chat = Chat(tokenizer)
    call = a_call(chat.prompt([USER]), [*encoded(tokenizer, "fine"), tokenizer.eos_token_id])
    history = [USER, chat.parse(call.sampled_ids)]
    assert chat.extend(call, history, [{"role": "tool", "content": "x"}]) is None, why


def test_an_end_of_text_after_the_last_turn_does_not_prevent_the_extension() -> None:
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}"
    )
    tokenizer = chat_tokenizer("chatml", template=template, eos="<|endoftext|>")
    chat = Chat(tokenizer)
    assert set(chat.stop_token_ids) == set(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    sampled = [*encoded(tokenizer, "fine"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    extended = chat.extend(a_call(chat.prompt([USER]), sampled), [USER, chat.parse(sampled)], [USER])
    assert extended is not None
    assert tokenizer.decode(extended) == rendered(tokenizer, [USER, {"role": "assistant", "content": "fine"}, USER])


def test_a_template_without_end_of_turn_token_is_extended_by_the_text_after_the_content() -> None:
    template = (
        "{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{%- endfor %}"
        "{{ 'assistant: ' if add_generation_prompt else '' }}"
    )
    tokenizer = chat_tokenizer("chatml", template=template, eos="<|endoftext|>")
    chat = Chat(tokenizer)
    call = a_call(chat.prompt([USER]), encoded(tokenizer, "fine"), FinishReason.LENGTH)
    extended = chat.extend(call, [USER, chat.parse(call.sampled_ids)], [USER])
    assert extended is not None
    assert tokenizer.decode(extended) == rendered(tokenizer, [USER, {"role": "assistant", "content": "fine"}, USER])


def test_a_template_without_end_of_turn_token_gets_no_space_before_new_messages() -> None:
    """Tokenizers like Llama 2's put a space before the first word of an input; new messages continue a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(
        ["user: fine assistant: \n"] * 4, trainers.BpeTrainer(special_tokens=["<unk>", "</s>"])
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = (
        "{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{%- endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '' }}"
    )
    chat = Chat(wrapped)
    user = {"role": "user", "content": "fine"}
    call = a_call(chat.prompt([user]), encoded(wrapped, "fine"), FinishReason.LENGTH)
    extended = chat.extend(call, [user, chat.parse(call.sampled_ids)], [user])
    assert extended is not None
    assert extended == encoded(wrapped, "user: fine\nassistant: fine\nuser: fine\nassistant:")
