"""Weight transfer over gloo: what vLLM's nccl engine does, for machines without an accelerator, and without one sender.

Every trainer rank that has a part of the weights sends it to the engines' workers itself, out of where it lies, and
they receive it where it belongs. So each byte travels once, and none is copied on the way unless it is cast.

    rank 0 ──its parts──► ┐
    rank 1 ──its parts──► ├─ workers of the engines of rank 0 (and likewise of any other rank that has engines)
    rank 2 ──its parts──► ┘

A rank and the workers of one rank's engines are a group, in which it sends: for each bucket a header and its small
parts in one message, then the others. The lifecycle is vLLM's (`start`, `update`, `finish`), and differs from the nccl
engine in one point: workers stage what they receive and load it in `finish`. So if the trainer dies half-way the old
weights stay live, at the price of a second copy of the weights in main memory.

Nobody waits for one that gave up. A sender says so instead of its next bucket, and the workers give up too; a rank
whose engines gave up says so in the store where they met, and who sends to them looks there while it waits.

wire.py       what the two sides say to each other: who sends what, where they meet, headers and bytes
worker.py     the engine's side, in its workers: receive, stage, load
trainer.py    the trainer's side, on every rank: send

Covered: tensor and data parallel workers, tied embeddings, experts, a deadline on every collective.
Not covered: draft models, quantised engines' completeness check (their scales never travel).
"""
