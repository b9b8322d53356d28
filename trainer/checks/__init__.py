"""Checks of the settings, before anything heavy starts."""
