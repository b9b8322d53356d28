"""HTML pages about a run: charts, report, token view."""
