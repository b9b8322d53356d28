"""Reward functions written for TRL: `fn(prompts, completions, **columns) -> list[float | None]`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from rollout.records import Message, Rollout
from rollout.system.deadline import function_name

# Keys of a data row that TRL passes under other names.
_RENAMED = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReward:
    """A reward function that scores a batch of rollouts in one call, with what it is called with."""

    function: Callable[..., Any]
    arguments: Callable[[Sequence[Rollout]], Mapping[str, Any]]
    load: Callable[[], None] = lambda: None
    """Brings what the function needs (a model) into memory, before its first call and without its deadline."""

    @property
    def name(self) -> str:
        return function_name(self.function)


def from_trl(function: Callable[..., Any], *, conversational: bool = True, **settings: Any) -> BatchReward:
    """Use a TRL reward function, sync or async, unchanged.

    It is called with keywords: `prompts` and `completions` (lists of messages each; with `conversational=False`
    texts: the last prompt message and the last assistant turn), `completion_ids` (the sampled tokens of all turns),
    each column of the data rows as a list, and `settings`. A function without `**kwargs` gets the ones it names. None
    in its answer means that it does not apply to that rollout. What it gets are copies.

    Raises:
        ConfigError: a setting that the function does not take.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_all else [key for key in settings if key not in parameters]
    if unknown:
        name = function_name(function)
        raise ConfigError(
            f"reward {name} does not take {unknown[0]!r}, it takes {', '.join(parameters)}: leave out "
            f"reward.settings.{name}.{unknown[0]}"
        )

    def arguments(rollouts: Sequence[Rollout]) -> Mapping[str, Any]:
        columns = sorted({key for rollout in rollouts for key in rollout.example if key not in _RENAMED})
        halves = [_split(copy.deepcopy(rollout.messages)) for rollout in rollouts]
        everything = {
            **{column: [copy.deepcopy(rollout.example.get(column)) for rollout in rollouts] for column in columns},
            "prompts": [prompt if conversational else _text(prompt) for prompt, _ in halves],
            "completions": [completion if conversational else _text(completion) for _, completion in halves],
            "completion_ids": [[token for call in rollout.calls for token in call.sampled_ids] for rollout in rollouts],
            **settings,
        }
        return {key: value for key, value in everything.items() if takes_all or key in parameters}

    return BatchReward(function=function, arguments=arguments)


def has_trl_signature(function: Callable[..., Any]) -> bool:
    """Whether a function asks for `completions`: then it is TRL's kind, else it takes a rollout."""
    return "completions" in inspect.signature(function).parameters


def _split(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What was given, and everything from the first assistant turn that follows the last given user turn.

    A prompt may hold assistant turns of its own (a conversation to go on with), so the border cannot be told from roles
    alone in a multi-turn episode; the first assistant turn is taken, which is right for prompts without any.
    """
    border = next((index for index, turn in enumerate(messages) if turn["role"] == "assistant"), len(messages))
    return list(messages[:border]), list(messages[border:])


def _text(messages: Sequence[Message]) -> str:
    return str(messages[-1].get("content") or "") if messages else ""
