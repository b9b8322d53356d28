"""Summary of a run's first step."""

from __future__ import annotations

import numpy as np

from lockstep.rollout.records import Rollout
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.observe.first_step import SHOWN_TOKENS, first_step_summary
from tests.fixtures.made_up_model import TEXTS, TOKENIZER, FakeTrainer, step_batch, two_turns


def summary_of(rollouts: list[Rollout], *, bias: float = 0.25) -> tuple[StepBatch, list[str]]:
    batch = step_batch(rollouts)
    return batch, first_step_summary(batch, FakeTrainer(bias=bias)(batch), TOKENIZER)


def test_the_summary_has_shapes_mask_and_divergence():
    batch, lines = summary_of([two_turns(0), two_turns(1, said="there")])
    text = "\n".join(lines)
    num_tokens = sum(map(len, batch.rows))
    assert f"2 rollouts, {len(batch.rows)} rows" in text
    assert f"{batch.layout.num_tokens} sampled tokens are trained" in text
    assert f"{num_tokens - batch.layout.num_tokens} are context" in text
    assert "kl_v1       +2.50e-01" in text
    assert "kl_v2       +3.13e-02" in text


def test_the_first_trained_tokens_of_a_row_are_listed_with_both_logprobs():
    batch, lines = summary_of([two_turns()])
    (row,) = batch.rows
    table = lines[-SHOWN_TOKENS:]
    positions = np.flatnonzero(row.loss_mask)[:SHOWN_TOKENS]
    for position, line in zip(positions, table, strict=True):
        cells = line.split()
        assert (int(cells[0]), int(cells[2])) == (position, row.ids[position])
        assert abs(float(cells[3]) - row.sampling_logprobs[position]) < 1e-5
        assert abs(float(cells[3]) - float(cells[4]) - 0.25) < 1e-4
        assert line.endswith(TEXTS[int(row.ids[position])].replace("\n", "⏎"))


def test_model_text_cannot_control_the_terminal():
    _, lines = summary_of([two_turns(said="\x1b]0;owned\x07")])
    assert not any(character in line for line in lines for character in "\x1b\x07\n")


def test_a_step_without_trained_tokens_is_one_line():
    _, lines = summary_of([])
    assert lines == ["first step: 0 rollouts, no trained tokens"]
