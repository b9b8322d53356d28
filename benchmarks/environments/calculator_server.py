"""An MCP server with the calculator of the demo task."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculator(expression: str) -> str:
    """Evaluate an expression of +, - and *."""
    if not set(expression) <= set("0123456789+-* ") or "**" in expression:
        raise ValueError("only numbers and + - *")
    return str(eval(expression))  # noqa: S307 (digits and operators only)


server.run("stdio")
