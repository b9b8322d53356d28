"""Why do engine and trainer disagree? Sample, score, compare with the record, and name the cause.

    cases.py       conversations of growing difficulty, sampled from the engine
    variants.py    the pipeline, broken on purpose
    scored.py      training rows with the trainer's logprobs beside the engine's
    match.py       rows against the record of what was sampled
    statistics.py  kl_v1, kl_v2 and their kind: in all, by token class, by turn, by offset
    causes.py      from evidence to a verdict and a named cause
    report.py      what comes out: a record, JSON, a table
    run.py         all of it in one command (`scripts/diagnose.py`)

Seed 000 is the investigation that this repeats.
"""
