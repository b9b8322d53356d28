"""Dumps of a small recurrent policy with one planted cause each. What it samples depends on all earlier tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

VOCAB, HIDDEN, PROMPT, ANSWER, ROWS = 96, 24, 6, 48, 48


@dataclass(frozen=True)
class Recurrent:
    """h_t = tanh(R h_{t−1} + E[id_t]), logits = W h_t."""

    embeddings: np.ndarray
    recurrence: np.ndarray
    head: np.ndarray

    @classmethod
    def of(cls, seed: int) -> Recurrent:
        draw = np.random.default_rng(seed).normal
        recurrence = draw(size=(HIDDEN, HIDDEN)) * 2.0 / np.sqrt(HIDDEN)
        return cls(draw(size=(VOCAB, HIDDEN)), recurrence, draw(size=(VOCAB, HIDDEN)) * 0.35)

    def changed(self, seed: int, size: float) -> Recurrent:
        head = self.head + size * np.random.default_rng(seed).normal(size=self.head.shape)
        return Recurrent(self.embeddings, self.recurrence, head)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """(rows, length, vocabulary): those at i are of token i + 1. ids: (rows, length)."""
        hidden = np.zeros((len(ids), HIDDEN))
        states = []
        for token in ids.T:
            hidden = np.tanh(hidden @ self.recurrence.T + self.embeddings[token])
            states.append(hidden)
        return np.stack(states, 1) @ self.head.T

    def score(self, ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """(rows, length − PROMPT) logprobs of the tokens after the prompt."""
        logp = log_softmax(self.logits(ids)[:, PROMPT - 1 : -1] / temperature)
        return np.take_along_axis(logp, ids[:, PROMPT:, None], 2)[..., 0]

    def sample(self, seed: int, temperature: float = 1.0, top_k: int = VOCAB) -> tuple[np.ndarray, np.ndarray]:
        """(ROWS, PROMPT + ANSWER) ids and (ROWS, ANSWER) logprobs over what could be chosen."""
        random = np.random.default_rng(seed)
        ids, logprobs = random.integers(1, VOCAB, (ROWS, PROMPT)), []
        for _ in range(ANSWER):
            logits = self.logits(ids)[:, -1] / temperature
            least = np.sort(logits, 1)[:, -top_k, None]
            logp = log_softmax(np.where(logits < least, -1e9, logits))
            chosen = np.argmax(logp + random.gumbel(size=logp.shape), 1)[:, None]
            ids = np.concatenate([ids, chosen], 1)
            logprobs.append(np.take_along_axis(logp, chosen, 1))
        return ids, np.concatenate(logprobs, 1)


@dataclass
class Planted:
    """A dump before it is written. Arrays: (ROWS, ANSWER); tokens past the length of a row do not exist."""

    ids: np.ndarray
    sampling: np.ndarray
    training: np.ndarray
    lengths: np.ndarray


def planted(cause: str, *, seed: int, rounding: float) -> Planted:
    """rounding: standard deviation of the difference that arithmetic leaves [nats]; bfloat16 leaves 0.014."""
    random = np.random.default_rng([seed, 1])
    policy = Recurrent.of(seed)
    temperature, top_k = (0.7 if cause == "temperature" else 1.0), (12 if cause == "truncated_support" else VOCAB)
    ids, sampling = policy.sample(seed, temperature, top_k)
    lengths = random.integers(16, ANSWER + 1, ROWS)
    lengths[0] = ANSWER  # rows were padded to the longest of them
    scored_ids, scorer = ids.copy(), policy
    if cause == "stale_weights":
        scorer = policy.changed(seed, 0.12)
    if cause == "retokenise":
        for row in range(0, ROWS, 2):
            first = PROMPT + int(random.integers(5, 11))
            scored_ids[row, first : first + 3] = random.integers(1, VOCAB, 3)
    training = scorer.score(scored_ids)
    if cause == "padding":
        for row, length in enumerate(lengths):
            pad = np.zeros((1, ANSWER - length), dtype=int)
            padded = np.concatenate([pad, ids[row : row + 1, : PROMPT + length]], 1)
            training[row, :length] = policy.score(padded)[0, ANSWER - length :]
    if cause == "shift":
        training = np.roll(training, 1, 1)
    if cause == "wrong_mask":
        sampling[:, 6:14] = 0.0
    training = np.minimum(training + rounding * random.normal(size=training.shape), 0.0)
    return Planted(ids, sampling, training, lengths)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    highest = logits.max(-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))
