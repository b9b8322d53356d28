"""Commands beside training: dry run, diagnosis, replay, servers."""
