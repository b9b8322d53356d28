"""Diagnosis: find out why engine and trainer disagree on logprobs.

    cases.py          conversations of growing difficulty, sampled from the engine
    saved.py          rollouts of an earlier run, and the settings to score them with
    variants.py       deliberate faults, to see how each one shows
    token_classes.py  special tokens, first tokens of turns, tool calls, others
    evidence.py       trained tokens with both logprobs, compared with the engine's record and summarized
    causes.py         severity and cause, from the evidence
    diagnosis.py      the result: record, JSON, console table
    examiner.py       cases in, diagnosis out (`scripts/diagnose.py`)

It repeats the investigation of "KL Divergence Analysis" (jphme, gist, 2026).
"""
