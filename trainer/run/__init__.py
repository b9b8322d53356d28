"""A whole run: assembly, lifecycle, reports, shutdown."""
