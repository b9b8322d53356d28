"""Sandbox for Python programs that a model wrote."""

REWARD_SETTING = "reward.settings.code_tests.unsafe"
ENVIRONMENT_SETTING = "environment.settings.unsafe"
"""Settings that turn the walls off."""
