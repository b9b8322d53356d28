"""A run on one page: what its directory holds (`saved_run`), drawn (`chart`), put together (`page`)."""
