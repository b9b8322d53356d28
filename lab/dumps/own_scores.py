"""Logprobs of a dump's tokens under a model of one's own choice: which of the two sides computes what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lockstep.lab.dumps.dump_rows import Dump
from lockstep.lab.dumps.measures import Measures, both
from lockstep.rollout.errors import DataError
from lockstep.trainer.data.demonstrations import Tokenized
from lockstep.trainer.model.policy import Policy
from lockstep.trainer.sft.demonstration_rows import batch_of

SAME = 0.2
"""Part of the distance between the two sides up to which a third agrees with one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScores:
    """Mean |Δ log π| between the model and either side [nats]."""

    model: str
    temperature: float
    to_sampling: float
    to_training: float
    between: float
    """Distance of the two sides."""

    @property
    def sentence(self) -> str:
        numbers = f"{self.to_sampling:.2g} nats from the engine, {self.to_training:.2g} from the trainer"
        agrees = self.to_sampling <= SAME * self.between, self.to_training <= SAME * self.between
        if agrees == (True, False):
            return f"{self.model} agrees with the engine ({numbers}): the trainer computes something else"
        if agrees == (False, True):
            return f"{self.model} agrees with the trainer ({numbers}): the engine computes something else"
        if max(self.to_sampling, self.to_training) <= self.between:
            return f"{self.model} lies between the two ({numbers}): both round, or it is neither's weights"
        return f"{self.model} agrees with neither ({numbers}): it is other weights, or scored at another temperature"


def score(
    dump: Dump,
    load: Callable[[], AbstractContextManager[tuple[Policy, Callable[..., Tensor]]]],
    *,
    model: str,
    temperature: float,
) -> OwnScores:
    """Score the trained tokens of a dump, at the temperature of its rows if they say it.

    Args:
        load: `lab.diagnose.open_scorer` of the model.
        model: name of it, for sentences.
        temperature: of the settings.

    Raises `DataError` for token ids that the model does not have, or rows at several temperatures.
    """
    temperatures = {row.temperature for row in dump.rows if row.temperature is not None}
    if len(temperatures) > 1:
        raise DataError(f"rows were sampled at {len(temperatures)} temperatures, expected one; split the dump")
    temperature = next(iter(temperatures), temperature)
    batch = batch_of([(_tokenized(row.ids_L, both(row)),) for row in dump.rows])
    with load() as (policy, score_batch):
        largest = max(int(row.ids_L.max()) for row in dump.rows)
        if largest >= policy.vocab_size:
            raise DataError(f"token id {largest}, and {model} has {policy.vocab_size} tokens")
        own_N = score_batch(batch, temperature=temperature).double().numpy()
    measures = Measures(dump=dump)
    return OwnScores(
        model=model,
        temperature=temperature,
        to_sampling=float(np.abs(own_N - measures.sampling_N).mean()),
        to_training=float(np.abs(own_N - measures.training_N).mean()),
        between=measures.abs_mean,
    )


def _tokenized(ids_L: np.ndarray, is_trained_L: np.ndarray) -> Tokenized:
    turns_L = np.where(is_trained_L, 0, -1).astype(np.int16)
    return Tokenized(ids=ids_L.astype(np.int32), loss_mask=is_trained_L, turns=turns_L)
