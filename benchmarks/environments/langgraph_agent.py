"""The calculator of the demo task as a graph of LangGraph, whose model speaks chat completions."""

from __future__ import annotations

from typing import Any

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from langgraph.graph import START, MessagesState, StateGraph  # type: ignore[import-not-found]
from langgraph.prebuilt import ToolNode, tools_condition  # type: ignore[import-not-found]

from lockstep.rollout.environments.demo.calculator import calculator


async def play(base_url: str, api_key: str, example: dict[str, Any]) -> dict[str, int]:
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([calculator])

    async def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([calculator], handle_tool_errors=True))  # else an error of a tool ends the episode
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    result = await graph.compile().ainvoke({"messages": [("user", example["question"])]})
    return {"messages": len(result["messages"])}
