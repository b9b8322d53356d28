"""Commands beside training: dry run, servers."""
