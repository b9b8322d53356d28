"""Process-level helpers: event loop, deadlines, output capture, garbage collection, addresses, user files."""
