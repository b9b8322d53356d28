"""Diagnosis of disagreements between the logprobs of engine and trainer, after "KL Divergence Analysis" (jphme, gist,
2026). `examiner.py` turns cases into a diagnosis (`lockstep diagnose`)."""
