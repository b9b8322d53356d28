"""Saved rollouts of a run: lists with filters, a search in texts, and one rollout with its tokens."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.lab.watch.run_table import WatchedRun
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import IMAGE_DIGEST, ImageSpan, Rollout, RolloutStatus, content_text, is_stored_image
from lockstep.rollout.safe_text import safe_text
from lockstep.rollout.saved_rollouts import UPDATE_FILE, from_json
from lockstep.rollout.system.plain_files import opened_plain, plain_lines, read_plain
from lockstep.trainer.observe.transcript import image_mark, parts, shortened, tool_calls

MAX_SHOWN = 200
MAX_FILES = 24
"""Files whose lists are kept."""
MAX_PREVIEW = 160
MAX_MESSAGE = 20_000
MAX_TOKENS = 20_000
"""Tokens of a rollout that are shown."""
MAX_IMAGE_BYTES = 2**26
PNG = b"\x89PNG\r\n\x1a\n"
"""First bytes of a PNG file."""
DAMAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of a line that is not a rollout."""

ORDERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "saved": lambda head: head["line"],
    "worst": lambda head: (not head["isFailed"], head["reward"]),
    "best": lambda head: (head["isFailed"], -head["reward"]),
    "longest": lambda head: -head["tokens"],
}
"""Sort keys of a list, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filters and order of a list. Raises ConfigError for an unknown order."""

    order: str = "saved"
    text: str = ""
    """Text that a message holds, in any case."""
    prompt: str = ""
    """Text of the prompt's messages; "" for all prompts."""
    only_failed: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"order is {self.order!r:.40}, expected one of {', '.join(ORDERS)}")

    @property
    def words(self) -> list[str]:
        """Words that a line of a file holds if its rollout is in the list, however JSON writes the rest."""
        return re.findall("[a-z0-9]+", f"{self.text} {self.prompt}".lower())

    def takes(self, entry: Entry) -> bool:
        return (
            self.text.lower() in entry.text
            and self.prompt in ("", entry.prompt)
            and (entry.head["isFailed"] or not self.only_failed)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A rollout of a list."""

    head: dict[str, Any]
    prompt: str
    text: str
    """Everything said in it, in lower case."""


class RolloutSearch:
    """Rollouts of watched runs. Lists of files that have not changed are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[list[Entry], int]] = OrderedDict()

    def files(self, run: WatchedRun) -> list[str]:
        """Return the names of the run's files of rollouts, oldest first."""
        with suppress(OSError):
            folder = run.inside("rollouts", "any").parent
            return sorted(path.name for path in folder.iterdir() if UPDATE_FILE.fullmatch(path.name))
        return []

    def of_step(self, run: WatchedRun, file: str, query: Query) -> dict[str, Any]:
        """Return the rollouts of one file. Raises OSError."""
        entries, num_damaged = self._read(run, file, [])
        heads = sorted((one.head for one in entries if query.takes(one)), key=ORDERS[query.order])
        return {"rollouts": heads[:MAX_SHOWN], "count": len(heads), "damaged": num_damaged, "before": ""}

    def of_all_steps(self, run: WatchedRun, query: Query, *, before: str, deadline: float) -> dict[str, Any]:
        """Return rollouts of all files older than `before` ("": of all), newest first, until `deadline` or `MAX_SHOWN`;
        `before` in the answer is where to go on, "" at the end."""
        heads: list[dict[str, Any]] = []
        names = [name for name in reversed(self.files(run)) if not before or name < before]
        goes_on = ""
        for name in names:
            with suppress(OSError):
                heads += [one.head for one in self._read(run, name, query.words)[0] if query.takes(one)]
            if time.monotonic() > deadline or len(heads) >= MAX_SHOWN:
                goes_on = name if name != names[-1] else ""
                break
        return {"rollouts": heads, "count": len(heads), "damaged": 0, "before": goes_on}

    def _read(self, run: WatchedRun, file: str, words: Sequence[str]) -> tuple[list[Entry], int]:
        """Return the rollouts of a file whose lines hold the words, and the number of damaged lines. Raises OSError."""
        path = _path(run, file)
        status = path.stat()
        key = (path, status.st_ino, status.st_size, status.st_mtime_ns)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        entries, num_damaged = [], 0
        for number, line in enumerate(plain_lines(path)):
            lower = line.lower() if words else ""
            if not all(word in lower for word in words):
                continue
            try:
                entries.append(_entry(from_json(json.loads(line)), file, number))
            except DAMAGE:
                num_damaged += 1
        if not words:
            self._kept[key] = entries, num_damaged
            if len(self._kept) > MAX_FILES:
                self._kept.popitem(last=False)
        return entries, num_damaged

    def prompt_of(self, run: WatchedRun, file: str, number: int) -> str:
        """Return the text of a rollout's prompt, for a query. Raises OSError, ConfigError if there is none."""
        return _prompt(self._saved(run, file, number))

    def rollout(self, run: WatchedRun, file: str, number: int) -> dict[str, Any]:
        """Return one rollout with messages and tokens. Raises OSError, ConfigError if there is none."""
        return _whole(self._saved(run, file, number), file, number, _token_texts(run))

    def image(self, run: WatchedRun, digest: str) -> bytes:
        """Return the PNG file of an image. Raises OSError, ConfigError for a name that is not a digest."""
        if not IMAGE_DIGEST.fullmatch(digest):
            raise ConfigError("the digest of an image has 64 hexadecimal digits")
        with opened_plain(run.inside("media", f"{digest}.png")) as file:
            content = file.read(MAX_IMAGE_BYTES + 1)
        if len(content) > MAX_IMAGE_BYTES or not content.startswith(PNG):
            raise OSError(f"{digest[:6]}….png is not a PNG file of at most {MAX_IMAGE_BYTES} bytes")
        return content

    def _saved(self, run: WatchedRun, file: str, number: int) -> Rollout:
        line = next(islice(plain_lines(_path(run, file)), number, None), None)
        if line is None:
            raise ConfigError(f"{file} has no line {number + 1}")
        try:
            return from_json(json.loads(line))
        except DAMAGE as error:
            raise ConfigError(f"{file}:{number + 1} is not a saved rollout: {_short(error)}") from error


def _short(error: BaseException) -> str:
    return safe_text(str(error), 300)


def _path(run: WatchedRun, file: str) -> Path:
    if not UPDATE_FILE.fullmatch(file):
        raise OSError(f"{safe_text(file, 80)} is not a name that a run gives")
    return run.inside("rollouts", file)


def _message_text(message: Mapping[str, Any]) -> str:
    return "\n".join(
        [content_text(message, image_mark), *tool_calls(message), *map(str, message.get("tool_call_errors") or ())]
    )


def _prompt(rollout: Rollout) -> str:
    return "\n".join(content_text(message, image_mark) for message in rollout.prompt)


def _entry(rollout: Rollout, file: str, number: int) -> Entry:
    text = "\n".join(map(_message_text, rollout.messages)).lower()
    return Entry(head=_head(rollout, file, number), prompt=_prompt(rollout), text=text)


def _head(rollout: Rollout, file: str, number: int) -> dict[str, Any]:
    question = next((content_text(m, image_mark) for m in rollout.messages if m["role"] == "user"), "")
    answer = _message_text(rollout.sampled_turns[-1]) if rollout.sampled_turns else ""
    return {
        "file": file,
        "line": number,
        "update": int(file.split("-")[1].split(".")[0]),
        "id": rollout.rollout_id,
        "group": rollout.group_id,
        "reward": rollout.reward,
        "rewards": {safe_text(name, 60): value for name, value in rollout.rewards.items()},
        "status": rollout.status.value,
        "isFailed": rollout.status is RolloutStatus.FAILED or rollout.dropped_by is not None,
        "error": safe_text(rollout.error or "", 400),
        "tokens": rollout.num_sampled,
        "turns": rollout.num_turns,
        "question": safe_text(shortened(question, MAX_PREVIEW)),
        "answer": safe_text(shortened(answer, MAX_PREVIEW)),
    }


def _whole(rollout: Rollout, file: str, number: int, texts: Callable[[int], str]) -> dict[str, Any]:
    examples, messages = parts(rollout)
    left = MAX_TOKENS
    calls = []
    for call in rollout.calls:
        prompt_ids = call.prompt.own_ids[:left]
        sampled_ids = call.sampled_ids[: left - len(prompt_ids)]
        starts = {image.start - call.prompt.num_shared: image for image in call.images}
        left -= len(prompt_ids) + len(sampled_ids)
        calls.append({
            "prompt": list(_prompt_tokens(prompt_ids, starts, texts)),
            "sampled": [
                (token, texts(token), round(logprob, 5))
                for token, logprob in zip(sampled_ids, call.sampled_logprobs, strict=False)
            ],
            "finish": call.finish_reason.value,
        })  # fmt: skip
    return {
        **_head(rollout, file, number),
        "messages": [
            {
                "role": safe_text(str(message["role"]), 20),
                "pieces": _pieces(message),
                "calls": [safe_text(call, MAX_MESSAGE) for call in tool_calls(message)],
                "errors": [safe_text(str(error), MAX_MESSAGE) for error in message.get("tool_call_errors") or ()],
                "isExample": message in examples,
            }
            for message in [*examples, *messages]
        ],
        "example": safe_text(json.dumps(rollout.example, default=str, ensure_ascii=False, indent=1), MAX_MESSAGE),
        "calls": calls,
        "isCut": left <= 0,
    }


def _pieces(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return texts, and images by digest and name, of a message in order."""
    content = message.get("content")
    if not isinstance(content, list | tuple) or not any(map(is_stored_image, content)):
        return [{"text": safe_text(content_text(message, image_mark), MAX_MESSAGE)}]
    return [
        {"digest": safe_text(part["digest"], 64), "name": safe_text(image_mark(part), MAX_PREVIEW)}
        if is_stored_image(part)
        else {"text": safe_text(content_text({"content": [part]}, image_mark), MAX_MESSAGE)}
        for part in content
    ]


def _prompt_tokens(
    ids: Sequence[int], images: Mapping[int, ImageSpan], texts: Callable[[int], str]
) -> Iterator[tuple[int, str] | dict[str, Any]]:
    """Yield id and text of each token, and one entry for all tokens of an image. images: by their first position."""
    end = 0
    for position, token in enumerate(ids):
        if image := images.get(position):
            end = position + image.end - image.start
            mark = image_mark({"type": "image", "digest": image.digest})
            yield {"digest": image.digest, "name": mark, "tokens": image.end - image.start}
        elif position >= end:
            yield token, texts(token)


def _token_texts(run: WatchedRun) -> Callable[[int], str]:
    """Return the text of a token by its id, with the tokenizer that the run saved or the one that it started with."""
    tokenizer = None
    places = (run.path / "model", Path(str(run.setting("model.path"))))
    for folder in places:
        with suppress(OSError, ValueError, ConfigError):
            tokenizer = _tokenizer(read_plain(folder / "tokenizer.json"))
            break

    def text(token: int) -> str:
        if tokenizer is None:
            return f"[{token}]"
        piece = tokenizer.decode([token], skip_special_tokens=False)
        return piece if piece and "\ufffd" not in piece else tokenizer.id_to_token(token) or f"[{token}]"

    return text


def _tokenizer(text: str) -> Any:
    """Return the tokenizer of a tokenizer.json. Raises ConfigError."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing more specific
        raise ConfigError(f"tokenizer.json is damaged: {_short(error)}") from error
