"""Reward functions with TRL's signature: `fn(prompts, completions, **columns) -> list[float | None]`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.rewards.batches import BatchReward
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Message, Rollout
from lockstep.rollout.system.deadline import function_name

_RENAMED = ("prompt", "completion", "completion_ids")
"""Keys of a data row that TRL passes under other names."""


def from_trl(function: Callable[..., Any], *, conversational: bool = True, **settings: Any) -> BatchReward:
    """Adapt an unchanged TRL reward function, sync or async.

    It is called with keywords: `prompts` and `completions` (lists of messages each; with `conversational=False` texts:
    the last prompt message and the last assistant turn), `completion_ids` (the sampled tokens of all turns), each
    column of the data rows as a list, and `settings`. A function without `**kwargs` gets those that it names. All of
    them are copies. Raises `ConfigError` for a setting that the function does not take.
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
        halves = [copy.deepcopy((list(rollout.prompt), list(rollout.completion))) for rollout in rollouts]
        everything = {
            **{column: [copy.deepcopy(rollout.example.get(column)) for rollout in rollouts] for column in columns},
            "prompts": [prompt if conversational else _text(prompt) for prompt, _ in halves],
            "completions": [completion if conversational else _text(completion) for _, completion in halves],
            "completion_ids": [[token for call in rollout.calls for token in call.sampled_ids] for rollout in rollouts],
            **settings,
        }
        return {key: value for key, value in everything.items() if takes_all or key in parameters}

    return BatchReward(function=function, arguments=arguments)


def _text(messages: Sequence[Message]) -> str:
    return str(messages[-1].get("content") or "") if messages else ""
