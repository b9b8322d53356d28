"""Weight transfer from the trainer to engines."""
