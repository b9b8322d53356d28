"""Dumps in the forms that trainers write: ids, mask and logprobs end up at the same tokens, and others are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.lab.dumps.dump_readers import read_dump
from lockstep.lab.dumps.dump_rows import DumpRow
from lockstep.lab.dumps.measures import Measures
from lockstep.rollout.errors import ConfigError, DataError
from tests.fixtures.paths import ROOT

IDS = [11, 12, 13, 21, 22, 31, 23, 24]
"""Three tokens of a prompt, two of an answer, an observation, two of a second answer."""
MASK = [0, 0, 0, 1, 1, 0, 1, 1]
SAMPLING = [0.0, 0.0, 0.0, -1.0, -2.0, 0.0, -3.0, -4.0]
TRAINING = [0.0, -9.0, -9.0, -1.5, -2.5, -9.0, -3.5, -4.5]
PAD = [0] * 4

ANSWER = {"ids": IDS, "prompt_length": 3, "mask": MASK[3:], "sampling_logprobs": SAMPLING[3:],
          "training_logprobs": TRAINING[3:], "version": 7, "temperature": 0.5}  # fmt: skip
WHOLE = ANSWER | {"mask": MASK, "sampling_logprobs": [None, *SAMPLING[1:]], "training_logprobs": TRAINING}
PRIME_RL = {"schema_version": 1, "step": 3, "token_ids": IDS, "loss_mask": list(map(bool, MASK)),
            "inference_logprobs": SAMPLING, "trainer_logprobs": TRAINING, "advantages": [0.5] * 8}  # fmt: skip
NEMO_RL = {"input_lengths": [8], "token_ids": [IDS + PAD], "token_loss_mask": [MASK + PAD],
           "generation_logprobs": [SAMPLING + PAD], "prev_logprobs": [TRAINING + PAD],
           "sample_loss_mask": [1.0], "rewards": [1.0]}  # fmt: skip
SLIME = {"tokens": torch.tensor(IDS), "loss_masks": torch.tensor(MASK[3:]), "response_lengths": 5,
         "rollout_log_probs": torch.tensor(SAMPLING[3:]), "log_probs": torch.tensor(TRAINING[3:])}  # fmt: skip


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "dump.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def of_slime(folder: Path, *samples: dict[str, Any]) -> Path:
    path = folder / "0.pt"
    torch.save({"format_version": 2, "samples": list(samples), "dp_shards": []}, path)
    return path


def check(row: DumpRow) -> None:
    assert row.ids_L.tolist() == IDS
    assert row.is_trained_L.tolist() == list(map(bool, MASK))
    assert row.sampling_L[row.is_trained_L].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert row.training_L[row.is_trained_L].tolist() == [-1.5, -2.5, -3.5, -4.5]
    assert row.turns == [slice(3, 5), slice(6, 8)]


@pytest.mark.parametrize(
    ("row", "form"),
    [(ANSWER, "docs/kl.md"), (WHOLE, "docs/kl.md"), (PRIME_RL, "prime-rl"), (NEMO_RL, "NeMo RL"), (SLIME, "slime")],
)
def test_a_row_reads_the_same_in_every_form(row: dict[str, Any], form: str, tmp_path: Path) -> None:
    dump = read_dump(of_slime(tmp_path, row) if row is SLIME else written(tmp_path, row))
    assert dump.format == form
    (found,) = dump.rows
    check(found)
    assert (found.version, found.temperature) == ((7, 0.5) if form == "docs/kl.md" else (None, None))
    assert Measures(dump=dump).d_N.tolist() == [0.5] * 4


def test_an_answer_may_begin_with_tokens_that_are_not_trained(tmp_path: Path) -> None:
    late = ANSWER | {"prompt_length": 2, "mask": MASK[2:],
                     "sampling_logprobs": SAMPLING[2:], "training_logprobs": TRAINING[2:]}  # fmt: skip
    (row,) = read_dump(written(tmp_path, late)).rows
    check(row)
    of_answer = {"loss_masks": torch.tensor(MASK[2:]), "rollout_log_probs": torch.tensor(SAMPLING[2:]),
                 "log_probs": torch.tensor(TRAINING[2:])}  # fmt: skip
    (row,) = read_dump(of_slime(tmp_path, SLIME | of_answer)).rows
    check(row)


def test_rows_that_train_nothing_are_counted(tmp_path: Path) -> None:
    untrained = NEMO_RL | {"sample_loss_mask": [0.0]}
    dump = read_dump(written(tmp_path, NEMO_RL, untrained, untrained))
    assert len(dump.rows) == 1
    assert dump.notes[0] == "left out 2 of 3 rows, which train no token"


def test_files_of_a_folder_are_read_in_order(tmp_path: Path) -> None:
    for rank, first in enumerate((50, 60)):
        row = PRIME_RL | {"token_ids": [first, *IDS[1:]]}
        (tmp_path / f"rank_{rank}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "STABLE").touch()
    assert [row.ids_L[0] for row in read_dump(tmp_path).rows] == [50, 60]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1 + 1", "completion": "2", "reward": 1.0}, "TRL writes texts"),
        ({"input": "1 + 1", "output": "2", "score": 1.0, "step": 1}, "verl writes texts"),
        ({"ids": IDS}, "rows with ids; expected the fields of a known form"),
    ],
)
def test_rows_without_ids_and_logprobs_are_refused(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_dump(written(tmp_path, row))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prompt_length": 0}, "prompt_length is 0, expected 1 to 8"),
        ({"sampling_logprobs": SAMPLING[4:]}, "4 sampling_logprobs, expected 8"),
        ({"training_logprobs": None}, "no training_logprobs; found ids, mask"),
        ({"mask": [1, 0]}, "a mask of 2, expected 8 entries or 5, of the answer"),
        ({"ids": [*IDS[:-1], 2.5]}, "token ids: expected a list of whole numbers"),
        ({"ids": [-1, *IDS[1:]]}, "token id -1, expected none below 0"),
        ({"sampling_logprobs": ["a"] * 5}, "sampling_logprobs: expected a list of numbers"),
        ({"mask": [2] * 5}, "loss mask: expected a list of true and false"),
        ({"mask": []}, "a mask of 0, expected 8 entries or 5, of the answer"),
        ({"ids": 5}, "not a row of docs/kl.md"),
        ({"sampling_logprobs": 1.5}, "not a row of docs/kl.md"),
        ({"sampling_logprobs": [[-1.0]] * 5}, "sampling_logprobs"),
        ({"ids": [2**70, *IDS[1:]]}, "token ids: expected a list of whole numbers"),
        ({"mask": "trains"}, "a mask of 6, expected 8 entries or 5, of the answer"),
        ({"mask": "train"}, "loss mask: expected a list of true and false"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
    ],
)
def test_a_row_that_contradicts_itself_is_named(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dump\.jsonl line 2: ") as error:
        read_dump(written(tmp_path, ANSWER, ANSWER | change))
    assert expected in str(error.value)


def test_a_dump_without_sampling_logprobs_is_refused(tmp_path: Path) -> None:
    """They are missing, which says nothing about the mask."""
    with pytest.raises(DataError, match=r"no row has a sampling logprob; let the engine report logprobs"):
        read_dump(written(tmp_path, ANSWER | {"sampling_logprobs": [None] * 5}))


def test_rows_of_parquet_are_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "dump.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ANSWER] * 130), path)
    dump = read_dump(path)
    assert len(dump.rows) == 130
    check(dump.rows[-1])


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text("[1, 2]\n")
    with pytest.raises(DataError, match="line 1: list, expected an object with ids"):
        read_dump(path)
    path.write_text("{\n")
    with pytest.raises(DataError, match="line 1: no JSON"):
        read_dump(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="no rows"):
        read_dump(path)
    with pytest.raises(ConfigError, match="expected a file of rows"):
        read_dump(tmp_path / "missing.jsonl")
    torch.save([1], tmp_path / "1.pt")
    with pytest.raises(DataError, match="no list of samples"):
        read_dump(tmp_path / "1.pt")


class Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("ran"),)  # type: ignore[return-value]


def test_a_file_of_torch_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"samples": [Runs()]}, tmp_path / "0.pt")
    with pytest.raises(DataError, match="holds more than tensors and numbers"):
        read_dump(tmp_path / "0.pt")
    assert not (tmp_path / "ran").exists()


def test_the_lines_for_verl_write_rows_that_read_the_same(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "kl.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def write_ids" in block]
    made: dict[str, Any] = {}
    exec(code, made)
    batch = {
        "prompts": torch.tensor([[0, 0, *IDS[:3]]]),
        "responses": torch.tensor([[*IDS[3:], 0, 0]]),
        "attention_mask": torch.tensor([[0, 0, *[1] * 8, 0, 0]]),
        "response_mask": torch.tensor([[*MASK[3:], 0, 0]]),
        "rollout_log_probs": torch.tensor([[*SAMPLING[3:], 0.0, 0.0]]),
        "old_log_probs": torch.tensor([[*TRAINING[3:], 0.0, 0.0]]),
    }
    made["write_ids"](batch, tmp_path / "dump.jsonl")
    (row,) = read_dump(tmp_path / "dump.jsonl").rows
    check(row)


def test_the_line_on_the_page_reads() -> None:
    page = (ROOT / "docs" / "kl.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    row = json.loads(text)
    assert len(row["ids"]) - row["prompt_length"] == len(row["mask"]) == len(row["sampling_logprobs"])
    assert np.all(np.array(row["training_logprobs"]) < 0)
