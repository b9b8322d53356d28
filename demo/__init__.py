"""Makers of demo tasks: data, a tokenizer, and a small warm-started model that training improves in a minute.

Start with `make.py`. `tasks.py` defines the tasks; `warm_start.py` trains the model to be right some of the time.
"""

if __name__ == "demo":  # it would be a second copy of every module
    raise ImportError("found `import demo`, expected `import lockstep.demo`: Lockstep's packages moved into `lockstep`")
