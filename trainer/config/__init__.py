"""Schema of the settings, and values derived from it."""
