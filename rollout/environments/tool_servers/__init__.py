"""Tools of MCP servers: their settings, connections with limits, and the environment that offers them."""
