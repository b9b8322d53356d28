"""Programs and reward functions that attack the sandbox and the reward workers, one per file, and their runner.

The first comment of a file says the attack and what must come of it (`tests/hostile/cases.py`).
"""
