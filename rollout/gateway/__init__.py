"""OpenAI-compatible server in front of the engine, which trains an existing agent without changes to its code."""
