"""Objectives of distillation: divergences from a teacher, and credit from its log-probabilities."""
