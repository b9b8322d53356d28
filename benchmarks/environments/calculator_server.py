"""An MCP server with the calculator of the demo task."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

from lockstep.rollout.environments.demo.calculator import evaluate

server = MCPServer("calculator")


@server.tool()
def calculator(expression: str) -> str:
    """Evaluate an expression of +, - and *."""
    return str(evaluate(expression))


server.run("stdio")
