"""The calculator of the demo task as an agent of pydantic-ai, which speaks chat completions."""

from __future__ import annotations

from typing import Any

import pydantic_ai  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

from lockstep.rollout.environments.demo.calculator import evaluate


def calculator(expression: str) -> int:
    """Evaluate an integer expression with + - * and parentheses."""
    try:
        return evaluate(expression)
    except ValueError as error:
        raise pydantic_ai.ModelRetry(str(error)) from None


async def play(base_url: str, api_key: str, example: dict[str, Any]) -> dict[str, int]:
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = pydantic_ai.Agent(model, tools=[calculator])
    try:
        result = await agent.run(example["question"], usage_limits=pydantic_ai.UsageLimits(request_limit=3))
    except pydantic_ai.exceptions.AgentRunError:  # no answer in three requests, or a second call that does not fit
        return {"unfinished": 1}
    return {"requests": result.usage.requests}
