"""A whole run: assembly, life, reports, shutdown."""
