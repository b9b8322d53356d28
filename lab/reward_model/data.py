"""Comparisons of responses, read from data set rows as token ids.

    {"prompt": "...", "responses": ["...", ...], "best": 2}             best of n: a text and its continuations
    {"prompt": "...", "chosen": "...", "rejected": "..."}               pair; optional "margin"
    {"prompt": [messages], "chosen": [messages], "rejected": [...]}     conversations, through the chat template
    {"chosen": [messages], "rejected": [messages]}                      the same, as whole conversations

With whole conversations, which do not begin with the assistant, `prompt` only repeats their beginning and is ignored.
`query` is another name for `prompt`. Prompt and response are tokenized separately and joined as ids, so that the
prompt's tokens are the same for every response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from lockstep.rewards.model.tokenizing import chat_ids, text_ids
from lockstep.rollout.chat.chat import load_tokenizer
from lockstep.rollout.errors import ConfigError, DataError, TemplateError
from lockstep.rollout.models.stored_model import read_config
from lockstep.trainer.data.datasets import json_or_text
from lockstep.trainer.data.reader import Row, Rows, every
from lockstep.trainer.engines.named_models import longest_context, refuse_outside, vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Responses to one query, one of them preferred."""

    sequences: tuple[tuple[int, ...], ...]
    """Ids of query and response, one sequence per response."""
    best: int
    margin: float = 0.0
    """Amount by which the preferred score must win."""

    def __post_init__(self) -> None:
        if len(self.sequences) < 2 or not 0 <= self.best < len(self.sequences):
            raise DataError(
                f"a comparison needs at least two responses and one of them as the best; found "
                f"{len(self.sequences)} and best={self.best}"
            )
        if any(not sequence for sequence in self.sequences):
            raise DataError("a comparison has an empty response; expected at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Length limits [tokens]; None: no limit."""

    query: int | None = None
    """Longer queries keep their beginning, as in lm-human-preferences."""
    response: int | None = None
    total: int | None = None
    """Longer sequences keep their end, where the score is read."""


def read_tokenizer(path: str, *, setting: str, trust_remote_code: bool) -> tuple[PreTrainedTokenizerFast, int | None]:
    """Load the tokenizer of a model; return it with the longest context of the model, if its config says so.

    Raises `ConfigError`: no tokenizer or config can be loaded, or the model lacks ids of the tokenizer.
    """
    config = read_config(path, setting=setting, trust_remote_code=trust_remote_code)
    ids = vocabulary(path, setting=setting, trust_remote_code=trust_remote_code)
    if ids is None:
        raise ConfigError(f"{setting}={path} has no tokenizer; save that of the model there (`save_pretrained`)")
    refuse_outside(setting, path, config.get_text_config().vocab_size, ids)
    tokenizer = load_tokenizer(path, setting=setting, trust_remote_code=trust_remote_code, template=None)
    return tokenizer, longest_context(config)


def read_comparisons(
    rows: Rows | Iterable[Row], tokenizer: PreTrainedTokenizerFast, lengths: Lengths, *, of: str = "comparisons"
) -> list[Comparison]:
    """Read all rows in order. of: name of the data set.

    Raises `DataError` with the places of rows of another form, and if no response differs from the others of its row.
    """
    records = Rows.of(rows).records()
    read = every(((at, partial(_read, one, tokenizer, lengths)) for at, one in records), of=of)
    comparisons = [item for _, item in read]
    if all(len(set(comparison.sequences)) == 1 for comparison in comparisons):
        raise DataError(
            f"{of}: the responses of each row are the same tokens, so there is nothing to learn; expected others, also "
            "after the cuts to data.response_tokens and data.max_tokens, and a chat template that shows them"
        )
    return comparisons


def _read(read: Callable[[], Row], tokenizer: PreTrainedTokenizerFast, lengths: Lengths) -> Comparison:
    row = read()
    prompt = row.get("prompt") if row.get("prompt") is not None else row.get("query")
    if row.get("responses") is not None and row.get("best") is not None:
        value, number = row["responses"], _number("best", row["best"])
        responses = json_or_text(value) if isinstance(value, str) else value
        if not isinstance(responses, list) or not number.is_integer():
            raise DataError(f"found responses {value!r:.80} and best {number:g}; expected a list, and an index in it")
        best = int(number)
    elif row.get("chosen") is not None and row.get("rejected") is not None:
        responses, best = [row["chosen"], row["rejected"]], 0
    else:
        raise DataError(
            f"found columns {', '.join(row)}; expected prompt, responses and best, or prompt, chosen and rejected"
        )
    try:
        sequences = tuple(tuple(_encode(prompt, response, tokenizer, lengths)) for response in responses)
    except TemplateError as error:
        raise DataError(str(error)) from error
    return Comparison(sequences=sequences, best=best, margin=_number("margin", row.get("margin") or 0.0))


def _number(column: str, value: Any) -> float:
    """Return a number, or that of a text, as in CSV."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"column {column} is {value!r:.80}, expected a number")
    return number


def _encode(prompt: Any, response: Any, tokenizer: PreTrainedTokenizerFast, lengths: Lengths) -> list[int]:
    if isinstance(response, str) and isinstance(prompt, str):
        query = text_ids(tokenizer, prompt)[: lengths.query]
        ids = [*query, *text_ids(tokenizer, response, special_tokens=False)[: lengths.response]]
    elif isinstance(prompt, str | list | None):
        if not tokenizer.chat_template:
            raise DataError("conversations need a tokenizer with a chat template; use texts, or another model.path")
        ids = chat_ids(tokenizer, conversation(prompt, response))
    else:
        raise DataError(f"prompt is a {type(prompt).__name__}; expected a text or a list of messages")
    return ids if lengths.total is None else ids[-lengths.total :]


def conversation(prompt: Any, response: Any) -> list[Mapping[str, Any]]:
    """Return the messages of a row that is not two texts."""
    completion = _messages(response, "assistant")
    is_whole = bool(completion) and completion[0].get("role") != "assistant"
    return [*completion] if is_whole else [*_messages(prompt, "user"), *completion]


def query_ids(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, lengths: Lengths) -> list[int]:
    """Return the prompt ids from which responses to this row are sampled. Raises `DataError` without a prompt."""
    prompt = row.get("prompt") if row.get("prompt") is not None else row.get("query")
    response = row["chosen"] if row.get("chosen") is not None else next(iter(row.get("responses") or []), "")
    if isinstance(prompt, str) and isinstance(response, str):
        if ids := text_ids(tokenizer, prompt)[: lengths.query]:
            return ids
        raise DataError("a row has an empty prompt; expected at least one token to sample from")
    messages = conversation(prompt, response)
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"a row has no prompt to sample from; found columns {', '.join(row)}")
    return chat_ids(tokenizer, messages, generation_prompt=True)


def _messages(value: Any, role: str) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return []
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"found {value!r:.80}, expected a text or a list of messages")
    return messages
