"""Environment `trl_rollout`: a function written for TRL's `rollout_func` (the contract of TRL 1.16).

    def play(prompts, trainer):
        tokenizer = trainer.processing_class
        ids = tokenizer.apply_chat_template(prompts[0], add_generation_prompt=True, return_dict=False)
        (turn,) = trainer.generate([ids])
        return {**{key: [value] for key, value in turn.items()}, "env_reward": [1.0]}

TRL itself need not be installed. `rollout/sampler/trl_episodes.py` runs its episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Message
from lockstep.rollout.system.deadline import is_async


class TRLRollout(RunsItself):
    def __init__(
        self, rollout_func: str | Callable[..., Any] | None = None, *, prompt_column: str | None = None, **limits: Any
    ):
        """rollout_func, limits: `function`, `timeout_s` and `max_concurrent` of `RunsItself`.

        Raises `ConfigError`: as `RunsItself`, and for an async function, which TRL's contract excludes.
        """
        super().__init__("rollout_func", rollout_func, **limits)
        if is_async(self.function):
            raise ConfigError("rollout_func is async, but TRL calls a plain function; write `def`, not `async def`")
        self._prompt = PromptReader(column=prompt_column)

    def read_row(self, example: Mapping[str, Any]) -> tuple[Message, ...]:
        return self._prompt.messages(example)

    def prompt(self, example: Mapping[str, Any]) -> tuple[Any, tuple[Message, ...]]:
        """Return the row's prompt as TRL passes it (a text stays a text), and as messages. Raises `DataError`."""
        messages = self.read_row(example)
        column = self._prompt.find(example)
        assert column is not None, "its messages were read"
        value = example[column]
        return (value if isinstance(value, str) else [dict(message) for message in messages]), messages
