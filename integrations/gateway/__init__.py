"""Server in front of the engine in the APIs of OpenAI and Anthropic, which trains an existing agent unchanged."""
