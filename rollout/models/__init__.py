"""Models as they are stored: checks of their files, loading, computed buffers."""
