"""An OpenEnv server whose MCP tool is the calculator of the demo task.

python openenv_calculator.py <port>
"""

from __future__ import annotations

import sys

import uvicorn  # type: ignore[import-not-found]
from fastmcp import FastMCP  # type: ignore[import-not-found]
from openenv.core.env_server.http_server import create_fastapi_app  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_environment import MCPEnvironment  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation  # type: ignore[import-not-found]
from openenv.core.env_server.types import Observation, State  # type: ignore[import-not-found]


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool
        def calculator(expression: str) -> str:
            """Evaluate an expression of +, - and *."""
            if not set(expression) <= set("0123456789+-* ") or "**" in expression:
                raise ValueError("only numbers and + - *")
            return str(eval(expression))  # noqa: S307 (digits and operators only)

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **_):
        return Observation(done=False, reward=None)

    def _step_impl(self, action, timeout_s=None, **_):
        return Observation(done=False, reward=0.0)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Calculator, CallToolAction, CallToolObservation, max_concurrent_envs=32)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
