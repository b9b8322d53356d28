"""A real dump of TRL's trainer with vLLM in its process, written by the class on docs/kl.md, and its diagnosis."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.models import save_tiny_model
from tests.fixtures.paths import ROOT

SCRIPT = """
import os, sys
from pathlib import Path
import torch, vllm
import vllm._custom_ops as ops
import vllm.model_executor.layers.utils as layers
torch.set_num_threads(1)
# Packed weights of vLLM's CPU build cannot be replaced, which TRL does.
ops._supports_onednn = False
layers.check_cpu_sgl_kernel = lambda n, k, dtype: False
init = vllm.LLM.__init__
vllm.LLM.__init__ = lambda self, *a, **k: init(
    self, *a, **{**k, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "dtype": sys.argv[3]}
)
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
exec(os.environ["PAGE"])


class Trainer(WritesIds, GRPOTrainer):
    pass


def reward(completions, **_):
    return [float(len(set(str(text))) % 7) for text in completions]


out = Path(sys.argv[1])
Trainer(
    model=sys.argv[2], reward_funcs=reward,
    train_dataset=Dataset.from_list([{"prompt": f"say {i} " * (1 + i % 3)} for i in range(32)]),
    args=GRPOConfig(
        output_dir=str(out), max_steps=1, num_generations=4, per_device_train_batch_size=32,
        max_completion_length=24, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=256,
        vllm_gpu_memory_utilization=0.1, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False,
        temperature=float(sys.argv[4]), log_completions=True,
    ),
).train()
"""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
    "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "RANK": "0", "LOCAL_RANK": "0",
    "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29678",
}  # fmt: skip


def diagnose(*words: str) -> tuple[int, str, str]:
    command = [sys.executable, str(ROOT / "scripts" / "diagnose.py"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def train(folder: Path, *, dtype: str, temperature: float) -> Path:
    """Make one update of TRL, and return the dump."""
    page = (ROOT / "docs" / "kl.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class WritesIds" in block]
    model = save_tiny_model(folder / "model", tied=False)
    command = [sys.executable, "-c", SCRIPT, str(folder / "run"), str(model), dtype, str(temperature)]
    environment = os.environ | ENVIRONMENT | {"PAGE": code}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run" / "dump.jsonl"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_dump_of_trl_is_read_and_judged(tmp_path: Path) -> None:
    dump = train(tmp_path, dtype="float32", temperature=0.7)
    status, out, err = diagnose("--ids", str(dump), "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["rows"], found["cause"]) == (32, "none"), out

    status, out, err = diagnose("--ids", str(dump), f"model.path={tmp_path / 'model'}", "model.dtype=float32", "--json")
    assert status == 0, err
    own = json.loads(out)["own_scores"]
    assert own["temperature"] == 0.7
    assert max(own["to_sampling"], own["to_training"]) < 1e-4

    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    stretched = tmp_path / "stretched.jsonl"
    for row in rows:  # as if its trainer had not divided by the temperature, to first order
        row["training_logprobs"] = [0.7 * logprob for logprob in row["training_logprobs"]]
    stretched.write_text("\n".join(map(json.dumps, rows)))
    status, out, _ = diagnose("--ids", str(stretched), "--json")
    assert status == 1
    assert json.loads(out)["cause"] in ("temperature", "unknown")

    (texts,) = (tmp_path / "run" / "completions").glob("*.parquet")
    status, _, err = diagnose("--ids", str(texts))
    assert status == 2
    assert "TRL writes texts" in err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_in_bfloat16_is_named(tmp_path: Path) -> None:
    dump = train(tmp_path, dtype="bfloat16", temperature=1.0)
    _, out, err = diagnose("--ids", str(dump), f"model.path={tmp_path / 'model'}", "model.dtype=float32", "--json")
    found = json.loads(out)
    assert found["cause"] == "dtype", out
    assert found["own_scores"]["to_training"] < 1e-4
    assert "agrees with the trainer" in found["own_scores"]["sentence"], err
