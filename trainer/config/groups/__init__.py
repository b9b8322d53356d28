"""Settings by group, one dataclass for each `<group>.` of the command line."""
