"""Data sets: rows, columns, order, length filter."""
