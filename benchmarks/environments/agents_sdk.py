"""The calculator of the demo task as an agent of OpenAI's Agents SDK, which speaks the Responses API."""

from __future__ import annotations

from typing import Any

import agents  # type: ignore[import-not-found]
import openai

from lockstep.rollout.environments.demo.calculator import evaluate


@agents.function_tool(strict_mode=False)
def calculator(expression: str) -> str:
    """Evaluate an integer expression with + - * and parentheses."""
    return str(evaluate(expression))


async def play(base_url: str, api_key: str, example: dict[str, Any]) -> dict[str, int]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
        agent = agents.Agent(name="calculator", tools=[calculator], model=model)
        config = agents.RunConfig(tracing_disabled=True)
        try:
            result = await agents.Runner.run(agent, example["question"], max_turns=3, run_config=config)
        except agents.exceptions.AgentsException:  # no answer in three turns, or a call that the SDK refuses
            return {"unfinished": 1}
    return {"turns": len(result.raw_responses)}
