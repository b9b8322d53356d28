"""Rollouts as readable conversations: speakers, text, tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.rollout.records import Message, Rollout, RolloutStatus, content_text
from lockstep.rollout.safe_text import terminal_safe
from lockstep.trainer.data.datasets import json_or_text

MAX_SHOWN_CHARS = 1200
"""Length above which a message loses its middle."""
STATUS_STYLE = {RolloutStatus.COMPLETED: "green", RolloutStatus.FAILED: "red"}
STATUS_STYLE_ELSE = "yellow"
ROLE_STYLE = {"user": "cyan", "assistant": "bold", "tool": "magenta"}
Mark = Callable[[Mapping[str, Any]], str]
"""Function that writes a part without text."""


def conversation(rollout: Rollout, *, wrapped: bool, mark: Mark | None = None) -> RenderableType:
    """Render headline and messages, without system turns and worked examples. wrapped: fold long lines beside the role,
    for a terminal; False: one line per message, for a file. mark: of images; None: `image_mark`."""
    examples, messages = parts(rollout)
    mark = mark or image_mark
    lines = [(_role(message), message_text(message, mark)) for message in messages if message["role"] != "system"]
    if examples:
        lines.insert(0, ("prompt", Text(f"[{len(examples)} messages of worked examples]", style="dim")))
    if not wrapped:
        return Group(headline(rollout), *(Text.assemble("    ", f"{role:>9} ", text) for role, text in lines))
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for role, text in lines:
        table.add_row(Text(role, style="dim"), text)
    return Group(headline(rollout), Padding(table, (0, 2)))


def parts(rollout: Rollout) -> tuple[list[Message], list[Message]]:
    """Return the worked examples in the prompt, and the other messages."""
    count = rollout.num_example_messages
    examples = [message for message in rollout.messages[:count] if message["role"] != "system"]
    systems = [message for message in rollout.messages[:count] if message["role"] == "system"]
    return examples, [*systems, *rollout.messages[count:]]


def headline(rollout: Rollout) -> Text:
    """Render reward, status and size of a rollout."""
    line = Text.assemble(
        ("  rollout ", "dim"),
        (f"{rollout.rollout_id}", "dim"),
        "  reward ",
        (f"{rollout.reward:.2f}", "bold"),
        "  ",
        (str(rollout.status), STATUS_STYLE.get(rollout.status, STATUS_STYLE_ELSE)),
        (f"  {rollout.num_sampled} tokens, {rollout.num_turns} turn{'s' * (rollout.num_turns != 1)}", "dim"),
    )
    if len(rollout.rewards) > 1:
        parts = ", ".join(f"{name} {value:.2f}" for name, value in rollout.rewards.items())
        line.append(f"  ({terminal_safe(parts)})", style="dim")
    if rollout.error:
        line.append(f"  {terminal_safe(rollout.error)}", style="red")
    return line


def message_text(message: Message, mark: Mark) -> Text:
    """Render text, tool calls, and errors of unparsable calls."""
    text = Text(style=ROLE_STYLE.get(str(message["role"]), ""))
    text.append(shortened(terminal_safe(content_text(message, mark))))
    for call in tool_calls(message):
        text.append(" " if text.plain else "")
        text.append(f"→ {shortened(terminal_safe(call))}", style="blue")
    for error in message.get("tool_call_errors") or ():
        text.append(" " if text.plain else "")
        text.append(f"✗ {terminal_safe(str(error))}", style="red")
    return text


def _role(message: Message) -> str:
    return terminal_safe(str(message["role"]))


def image_mark(part: Mapping[str, Any]) -> str:
    """Return a part without text by its type, an image with the beginning of its digest: `[image 39eb91…]`."""
    return f"[{part.get('type')} {str(part['digest'])[:6]}…]" if part.get("digest") else f"[{part.get('type')}]"


def tool_calls(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the calls of a message in the form of code."""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json_or_text(arguments)
        if isinstance(arguments, Mapping):
            arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
        yield f"{function['name']}({arguments})"


def shortened(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Return the text, or its beginning and end with the number of characters between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
