"""Episodes: the environment protocol, conversations with the engine, and training rows of their calls."""
