"""The calculator of the demo task as an agent of smolagents, which speaks chat completions."""

from __future__ import annotations

from typing import Any

import smolagents  # type: ignore[import-not-found]
from smolagents.models import ChatMessage, MessageRole  # type: ignore[import-not-found]

from lockstep.rollout.environments.demo.calculator import evaluate


@smolagents.tool
def calculator(expression: str) -> int:
    """Evaluate an integer expression with + - * and parentheses.

    Args:
        expression: for example 64*22-55
    """
    return evaluate(expression)


class BareAgent(smolagents.ToolCallingAgent):
    """An agent without the framework's own prompts, which a model of 0.5 M parameters has never seen."""

    def write_memory_to_messages(self, summary_mode: bool = False) -> list[ChatMessage]:
        messages = [one for one in super().write_memory_to_messages(summary_mode) if one.role != MessageRole.SYSTEM]
        for message in messages:
            message.content[0]["text"] = message.content[0]["text"].removeprefix("New task:\n")
        return messages


def play(base_url: str, api_key: str, example: dict[str, Any]) -> dict[str, float]:
    model = smolagents.OpenAIModel("policy", api_base=base_url, api_key=api_key)
    agent = BareAgent([calculator], model, max_steps=2, verbosity_level=smolagents.LogLevel.OFF)
    del agent.tools["final_answer"]  # the model has never seen it, nor does it answer by a call
    result = agent.run(example["question"], return_full_result=True)
    # An answer without a call is an error to the framework, so what the calculator returned is rewarded.
    return {"environment_reward": float(any(step.get("observations") == example["answer"] for step in result.steps))}
