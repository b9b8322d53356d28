"""Weight transfer over gloo, for CPU, with every trainer rank as a sender.

Each trainer rank sends its shards from where they lie to the engines' workers, which receive them in place: every byte
travels once, and nothing is copied on the way unless it is cast.

    rank 0 ──its parts──► ┐
    rank 1 ──its parts──► ├─ workers of rank 0's engines (likewise for every other rank with engines)
    rank 2 ──its parts──► ┘

One sender and the workers of one rank's engines form a process group. Per bucket the sender sends a header with its
small parts in one message, then its large parts. The lifecycle is vLLM's (`start`, `update`, `finish`); unlike vLLM's
nccl engine, workers stage the weights and load them in `finish`. If the trainer dies half-way the old weights stay
live, at the cost of a second copy of the weights in main memory, which malloc keeps for the next transfer (`KEEP_FREED`
in rollout/engine/arguments.py): allocating it again took three times as long as receiving 540 MB.

A failed sender sends an abort header instead of its next bucket, and the workers abort too. A rank whose engines failed
sets a flag in the store of their rendezvous, which its senders poll.

Covered: tensor and data parallel workers, tied embeddings, experts, a deadline on every collective.
Not covered: draft models; the check for missing parameters of quantized engines (their scales are never sent).
"""
