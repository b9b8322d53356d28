"""Proofs of model families with the configs of public checkpoints."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs/published_models.json"
"""Outcomes of `python -m scripts.published.prove --record`, from which docs/models.md has a table."""
