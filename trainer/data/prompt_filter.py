"""Rows whose prompts are longer than `data.max_prompt_tokens`. Runs without this setting do not load it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.mixed import AnyEnvironment, environment_of
from lockstep.rollout.episode.environment import RunsItself
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig
from lockstep.trainer.data.prompts import DataSet
from lockstep.trainer.distributed.distributed import Distributed

SHOWN_CHARS = 160


def without_long(
    data: Sequence[DataSet],
    environment: EnvironmentConfig,
    distributed: Distributed,
    loop: BackgroundLoop,
    chat: Chat,
    *,
    max_tokens: int,
    say: Callable[[str], None],
) -> list[DataSet]:
    """Return the data sets without rows of long prompts; a collective."""
    make = partial(make_environment, environment.name, **environment.settings)
    # Rank 0 measures for all, because the order must be equal on every rank.
    kept_indices = distributed.together(
        lambda: [
            short_enough(data_set, chat, make, loop, max_tokens=max_tokens, say=say)
            for data_set in (data if distributed.is_main else ())
        ]
    )
    return [one.subset(indices) for one, indices in zip(data, distributed.broadcast(kept_indices), strict=True)]


def short_enough(
    data: DataSet,
    chat: Chat,
    make: Callable[[], AnyEnvironment],
    loop: BackgroundLoop,
    *,
    max_tokens: int,
    say: Callable[[str], None],
) -> list[int]:
    """Return the indices of rows whose first prompt has at most `max_tokens` tokens, and report the dropped ones.

    Rows of environments that run themselves are kept.
    """

    async def lengths() -> list[int]:
        counts = []
        for row in data:
            environment = environment_of(make(), row)
            if isinstance(environment, RunsItself):
                counts.append(0)  # it makes its own prompts
                continue
            messages = await environment.reset(row)
            counts.append(len(chat.prompt(messages, environment.tools)))
        return counts

    tokens = loop.run(lengths())
    indices = [index for index, length in enumerate(tokens) if length <= max_tokens]
    name = f"data.sources.{data.name}" if data.name else "data.path"
    excess = len(tokens) - len(indices)
    if not excess:
        say(f"{name}: all {len(tokens)} prompts have at most {max_tokens} tokens, the longest {max(tokens)}")
        return indices
    first = next(index for index, length in enumerate(tokens) if length > max_tokens)
    text = " ".join(str(data[first]).split())
    say(
        f"{name}: {excess} of {len(tokens)} prompts are longer than data.max_prompt_tokens={max_tokens} and left out; "
        f"the longest has {max(tokens)} tokens, the first is row {first} with {tokens[first]}: {text:.{SHOWN_CHARS}}"
    )
    return indices
