"""Small tasks that a model made from nothing learns in a minute: data, tokenizer and warm-started model.

Start with `make.py`; `tasks.py` says what the tasks are and `warm_start.py` how the model comes to be middling at them.
"""
