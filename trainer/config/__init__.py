"""Settings: their schema, and what is derived from it."""
