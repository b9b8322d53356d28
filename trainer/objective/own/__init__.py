"""Losses and advantages of a user's file (`algorithm.loss=path/to/file.py:function`), declared as the built-in ones."""
