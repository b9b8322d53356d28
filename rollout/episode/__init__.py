"""One episode: the environment protocol, the calls to the engine, and their training rows."""
