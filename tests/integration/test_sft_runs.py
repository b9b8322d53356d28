"""Whole runs on demonstrations alone, through scripts/train.py: on one process, on two ZeRO-3 ranks, with adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.models import tiny_qwen3
from tests.fixtures.policies import TOKENIZER
from tests.fixtures.published import save_published
from tests.integration.test_run import metrics, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

NUM_TALKS = 10
ORIGINAL = 64
"""Original length of the longrope positions of a model."""
LORA = ("model.lora.rank=4", "optimizer.lr=2e-2")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Write a model and conversations of unequal lengths, one of them with two turns; return the overrides of a run."""
    directory = tmp_path_factory.mktemp("sft")
    tiny_qwen3(tied=True).save_pretrained(directory / "model")
    TOKENIZER.save_pretrained(directory / "model")
    talks = [
        [
            {"role": "user", "content": "add" * (1 + i % 3)},
            {"role": "assistant", "content": f"{i} and {i + 1}" * (1 + i)},
        ]
        for i in range(NUM_TALKS)
    ]
    talks[3] += [{"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]
    for name, chosen in (("talks", talks), ("heldout", talks[:3])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in chosen))
    return (
        "algorithm=sft", f"model.path={directory}/model", f"data.path={directory}/talks.jsonl",
        f"data.heldout_path={directory}/heldout.jsonl", "eval.every=6", "eval.before_training=true", "updates=6",
        "demonstrations.rows_per_update=5", "optimizer.lr=3e-3", "optimizer.schedule=constant",
        "token_budget=128", "checkpoint.every=3",
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    return [line["loss/demonstrations"] for line in metrics(run) if "loss/demonstrations" in line]


def heldout(run: Path) -> list[float]:
    return [line["eval/cross_entropy"] for line in metrics(run) if "eval/cross_entropy" in line]


@pytest.mark.parametrize(
    "lora", [pytest.param((), id="whole model"), pytest.param(LORA, id="lora", marks=pytest.mark.slow)]
)
def test_two_zero3_ranks_train_demonstrations_as_one_process_does(
    lora: tuple[str, ...], settings: tuple[str, ...], tmp_path: Path
) -> None:
    """With an odd number of rows per update, in packs that hold some of them, and a resumption."""
    train(*settings, *lora, f"run_root={tmp_path}", "run_name=one")
    train(*settings, *lora, f"run_root={tmp_path}", "run_name=two", "updates=3", ranks=2)
    train(*settings, *lora, f"run_root={tmp_path}", "run_name=two", "resume=auto", ranks=2)
    one, two = tmp_path / "one", tmp_path / "two"
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert len(losses(one)) == 6
    assert heldout(two)[-1] == pytest.approx(heldout(one)[-1], rel=1e-4)
    assert heldout(one)[-1] < heldout(one)[0] - 0.1, "nothing was learned"
    assert min(line["perf/microbatches"] for line in metrics(one) if "perf/microbatches" in line) > 1
    tokens = [line["loss/demonstrations_tokens"] for line in metrics(one) if "loss/demonstrations_tokens" in line]
    assert sum(tokens[:2]) == sum(tokens[2:4]) == sum(tokens[4:]), "two updates take each conversation once"
    found, expected = (load_file(run / "model" / "model.safetensors") for run in (two, one))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=0, msg=name)
    assert (one / "model" / "adapter").is_dir() == bool(lora)


def test_longrope_rows_train_alike_in_one_and_in_four_microbatches(tmp_path: Path) -> None:
    """Phi-4-mini's positions, and five conversations, of which one is beyond the original length: packed or not, each
    row has the factors of its own length. transformers chooses those of the longest row of a pack for all."""
    model = save_published("phi4_mini", tmp_path / "model")
    TOKENIZER.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = ORIGINAL
    (model / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": ORIGINAL}))
    texts = ("zq" * 20, "qx" * 20, "jz" * 20, "vq" * 17, "a long answer " * 12)
    rows = [
        [{"role": "user", "content": f"{index}"}, {"role": "assistant", "content": text}]
        for index, text in enumerate(texts)
    ]
    lengths = [len(TOKENIZER.apply_chat_template(row, return_dict=False)) for row in rows]
    assert max(lengths[:-1]) < ORIGINAL < lengths[-1], lengths
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    measured = {}
    for microbatches, budget in ((1, 1024), (4, max(lengths))):
        train(
            "algorithm=sft", f"model.path={model}", f"data.path={tmp_path}/rows.jsonl", "updates=1",
            "demonstrations.rows_per_update=5", f"token_budget={budget}", "checkpoint.every=0",
            f"run_root={tmp_path}", f"run_name=in-{microbatches}",
        )  # fmt: skip
        (line,) = (line for line in metrics(tmp_path / f"in-{microbatches}") if "loss/demonstrations" in line)
        assert line["perf/microbatches"] == microbatches, lengths
        measured[microbatches] = (line["loss/demonstrations"], line["optim/grad_norm"])
    assert measured[1] == pytest.approx(measured[4], rel=1e-5)
