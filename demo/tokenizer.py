"""A tokenizer for the demo tasks: byte-level BPE with a ChatML template like Qwen3's.

Merges may span punctuation and spaces, so the fixed part of a tool call is two or three tokens. Text that the model
must copy is never merged: digits and operators are one token each. Line breaks are single tokens too: every border
between template and content is a special token or a line break, so a conversation tokenized piece by piece equals the
same conversation tokenized at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 384

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
# As in Qwen3, single tokens that are not special: decoding keeps them, and a parser reads them.
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
IMAGE = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", IMAGE, "<|video_pad|>", "<|vision_end|>")
"""Special tokens of models that see images."""

CHAT_TEMPLATE = """\
{%- set opening = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if opening %}{{- opening + '\\n' }}{%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- ' ' + tool.function.name + '(' + tool.function.parameters.properties.keys() | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif opening %}
    {{- '<|im_start|>system\\n' + opening + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = tool_call.function or tool_call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_CONTENT_MACRO = """\
{%- macro text(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
VISION_TEMPLATE = _CONTENT_MACRO + CHAT_TEMPLATE.replace("+ message.content +", "+ text(message.content) +")
"""`CHAT_TEMPLATE` with images in messages of users and tools."""


def untrained(*, sees_images: bool = False) -> PreTrainedTokenizerFast:
    """Return the tokenizer without merges, which renders the training corpus."""
    return train_tokenizer([], sees_images=sees_images)


def train_tokenizer(conversations: Iterable[str], *, sees_images: bool = False) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `VOCAB_SIZE` ids on rendered conversations.

    sees_images: with the tokens around images, and a template that writes them.
    """
    if not sees_images:
        return _wrap(_byte_level(conversations, SPECIAL_TOKENS))
    tokenizer = _wrap(_byte_level(conversations, SPECIAL_TOKENS + VISION_TOKENS))
    tokenizer.chat_template = VISION_TEMPLATE
    return tokenizer


def _byte_level(corpus: Iterable[str], special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # The letter of a key such as c42 is copied too; it must not merge into "find c".
            pre_tokenizers.Split(Regex(r"[0-9+\-*\n]|[a-z](?=[0-9])"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP_TOKENS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_markup(corpus), trainer)
    # Added after training, because a trainer makes every token that it is given special.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def _without_markup(corpus: Iterable[str]) -> Iterable[str]:
    """Split texts at special tokens, which the trainer does not do."""
    for text in corpus:
        for token in (*SPECIAL_TOKENS, *VISION_TOKENS, *MARKUP_TOKENS):
            text = text.replace(token, "\0")
        yield from (piece for piece in text.split("\0") if piece)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
