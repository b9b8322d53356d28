"""Synthetic preferences over continuations: a small language, a model of it, and labels like those of human raters."""
