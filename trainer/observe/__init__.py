"""What people see of a run: metrics, console, W&B, pages."""
