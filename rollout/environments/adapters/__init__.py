"""Adapters: environments written for TRL and for the `verifiers` package, used unchanged."""
