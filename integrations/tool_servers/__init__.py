"""Tools of MCP servers: their settings, and connections with limits."""
