"""Conformance kit of environments: checks of an environment with its data and rewards, one verdict per line."""
