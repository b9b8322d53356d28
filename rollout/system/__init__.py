"""Process-level helpers: event loop, deadlines, captured output, garbage collection, addresses, user files."""
