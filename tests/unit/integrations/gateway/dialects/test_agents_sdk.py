"""Tests of an agent of OpenAI's Agents SDK, which talks to the gateway through the Responses API."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.rollout.episode.rows import rows_from_calls
from tests.fixtures.gateway import running
from tests.fixtures.tokenizers import chat_tokenizer

agents: Any = pytest.importorskip("agents", reason="the Agents SDK is missing: pip install openai-agents")

QWEN = chat_tokenizer("qwen3")
TURNS = (
    "<think>\nhm\n</think>\n\nlooking"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
    "<think>\ngood\n</think>\n\nsun in both<|im_end|>",
    "bye<|im_end|>",
)


async def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sun in {city}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_runs_of_an_agent_are_one_row(stream):
    async with running(QWEN, *TURNS) as server:
        model = agents.OpenAIResponsesModel(model="policy", openai_client=server.client_of("test"))
        tools = [agents.function_tool(get_weather)]
        agent = agents.Agent(name="weather", instructions="be brief", tools=tools, model=model)
        config = agents.RunConfig(tracing_disabled=True)

        async def run(asked: Any) -> Any:
            if not stream:
                return await agents.Runner.run(agent, asked, run_config=config)
            result = agents.Runner.run_streamed(agent, asked, run_config=config)
            async for _ in result.stream_events():
                pass
            return result

        first = await run("weather?")
        second = await run([*first.to_input_list(), {"role": "user", "content": "bye"}])
        assert (first.final_output, second.final_output) == ("sun in both", "bye")
        session = server.gateway._named["test"]
        assert dict(session.prompts) == {"root": 1, "extended": 2}
        (row,) = rows_from_calls(session.calls)
        assert row.num_trained == sum(len(call.sampled_ids) for call in session.calls)
        text = server.text(server.engine.prompts[-1])
        assert text.count("sun in Paris") == text.count("sun in Rome") == 1
