"""Checks of the trained model at the start of a run: rows apart from each other, and layers as exact as their dtype."""
