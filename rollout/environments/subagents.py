"""Environment `subagents`: the model delegates tasks to copies of itself.

`delegate(task)` runs a conversation of its own, with tools of its own. Several tasks of one turn run at the same time.
Every token that a copy sampled is trained, with the reward of the whole rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.rollout.environments.declaration import Declaration
from lockstep.rollout.environments.toolbox import Toolbox, ToolFunction, count_results
from lockstep.rollout.environments.tools import ToolEnvironment
from lockstep.rollout.episode.environment import OpenConversation, Step
from lockstep.rollout.errors import ConfigError
from lockstep.rollout.records import Message

AGENT_PROMPT = "You are given one task. Solve it with your tools, then state the result in one sentence."


class SubAgents(ToolEnvironment):
    """Gives the first conversation one tool, `delegate`, and the conversations that it opens the tools given here.

    The failure of a sub-agent (too many turns, no calls or no context left, too slow) is a tool error in the
    conversation that delegated, and counted.
    """

    declaration = Declaration(reads="prompt", max_turns=4)

    def __init__(
        self,
        functions: Sequence[ToolFunction] = (),
        *,
        files: Sequence[str] = (),
        agent_prompt: str = AGENT_PROMPT,
        max_agent_turns: int = 4,
        max_calls: int = 32,
        agent_timeout_s: float = 600.0,
        tool_timeout_s: float = 10.0,
        max_result_chars: int = 8192,
        **prompt: Any,
    ):
        """
        Args:
            functions, files, tool_timeout_s: tools of the sub-agents, as for `ToolEnvironment`.
            agent_prompt: system turn of every sub-agent. agent_timeout_s: wall-clock limit of one sub-agent.
            max_calls: maximum of engine calls of an episode, over all conversations.
            prompt: `prompt_column` and `system_prompt` of `ToolEnvironment`.

        Raises `ConfigError` if a function cannot be a tool, a file cannot be loaded, or a limit is below 1.
        """
        if max_agent_turns < 1 or max_calls < 1:
            raise ConfigError(
                f"max_agent_turns={max_agent_turns} and max_calls={max_calls} must be at least 1; "
                "set environment.settings.max_agent_turns=4 environment.settings.max_calls=32"
            )
        super().__init__([self.delegate], tool_timeout_s=agent_timeout_s, max_result_chars=max_result_chars, **prompt)
        self._agent_toolbox = Toolbox(
            functions, files=files, timeout_s=tool_timeout_s, max_result_chars=max_result_chars
        )
        self._agent_prompt = agent_prompt
        self._max_agent_turns = max_agent_turns
        self.max_calls = max_calls
        self._open: OpenConversation | None = None
        self._agents_outcome: Counter[str] = Counter()

    def host(self, open_conversation: OpenConversation) -> None:
        self._open = open_conversation

    async def step(self, message: Message) -> Step:
        self._agents_outcome = Counter()
        step = await super().step(message)
        return replace(step, outcome={**step.outcome, **self._agents_outcome})

    async def delegate(self, task: str) -> str:
        """Let an agent with tools solve a task. Several tasks can be delegated at the same time.

        Args:
            task: everything that the agent must know; it does not see this conversation
        """
        assert self._open is not None, "delegate before host"
        conversation = self._open(
            [{"role": "system", "content": self._agent_prompt}, {"role": "user", "content": task}],
            self._agent_toolbox.schemas,
        )
        self._agents_outcome["agents"] += 1
        answers: Sequence[Message] = ()
        for _ in range(self._max_agent_turns):
            message = await conversation.ask(answers)
            results = await self._agent_toolbox.answer(message)
            self._agents_outcome.update({f"agent_{name}": count for name, count in count_results(results).items()})
            if not results:
                return str(message["content"])
            answers = tuple(result.message for result in results)
        raise TimeoutError(f"the agent did not finish in {self._max_agent_turns} turns")
