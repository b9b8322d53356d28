"""Train families of models as published, and compare every sampled token with plain transformers.

    python -m scripts.published.prove                         # all, about half a minute each on two cores
    python -m scripts.published.prove "Qwen3" "Phi-4"         # these
    python -m scripts.published.prove --mode zero3 "Qwen3"    # in bfloat16 on two ranks of ZeRO-3
    python -m scripts.published.prove --record                # also writes docs/published_models.json

Each family is a small model with the config of a public checkpoint (configs.jsonl). `scripts/train.py` trains it for
three updates, on rows longer than its windows, chunks and original lengths. The log-probabilities that the engine
recorded are compared, row by row, with transformers' own model in eager mode, whole logits, in float32, under the
weights before the first update, after the first sync and after the second. The saved model is loaded and compared.

In float32 the largest difference is bounded by rounding. In bfloat16 the mean difference is compared with a floor: that
of transformers' own bfloat16 model from its float32 forward, on the same rows and weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.trainer.checkpoint.checkpoint import MANIFEST
from lockstep.trainer.distributed.unsharded_state import open_state
from scripts.published import RESULTS
from scripts.published.models import Published, plain_model, published_models, save_model

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 3
CONTEXT = 256
"""Tokens of a row at most, beyond the windows, chunks and original lengths of all configs."""
BOUND = 1e-4
"""Nats. Largest accepted difference of a sampled token in float32; rounding stays below 5e-5."""
MOVED = 100
"""Least change of a token by each update, as a multiple of the largest difference: otherwise an engine with old weights
would agree, too."""
REWARD = "def even(rollout):\n    return sum(ord(c) % 2 for c in rollout.answer) / max(1, len(rollout.answer))\n"
FLOORS, BETWEEN = 1.5, 2.0
"""Largest accepted mean difference in bfloat16, of the engine and between engine and trainer, which round apart, as a
multiple of the floor; measured: 0.5 to 1.3, and to 1.5."""
MOVED_IN_BF16 = 2
V2 = ROOT / "tests/fixtures/v2_on_cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Configuration of the run of a proof."""

    title: str
    dtype: str = "float32"
    ranks: int = 1
    """More than one: ZeRO-3 over gloo."""
    answer: int = CONTEXT - 64
    """Tokens of an answer at most."""
    has_v2: bool = False
    """vLLM's V2 model runner, in Triton's interpreter; without it V1."""


MODES = {
    "float32": Mode(title="float32, one process"),
    "zero3": Mode(title="bfloat16, ZeRO-3 on two ranks", dtype="bfloat16", ranks=2),
    "v2": Mode(title="bfloat16, V2 runner", dtype="bfloat16", answer=24, has_v2=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Outcome of one family: differences, or why there are none."""

    family: str
    checkpoint: str
    model_type: str
    mode: str = "float32"
    """Key of `MODES`."""
    tokens: int = 0
    """Compared tokens."""
    longest: int = 0
    """Tokens of the longest row."""
    differences: tuple[float, ...] = ()
    """|Δ log π| [nats] of the sampled tokens at first, after the first sync, after the second: largest in float32, mean
    in bfloat16."""
    floors: tuple[float, ...] = ()
    """The same between transformers' bfloat16 and float32 forward; empty in float32."""
    trained: tuple[float, ...] = ()
    """Mean |Δ log π| [nats] between engine and trainer, as the run reported it."""
    moved: float = 0.0
    """Change of the tokens' log π by an update [nats], of the update with the smallest one: largest in float32, mean in
    bfloat16."""
    saved: float | None = None
    """Largest difference of a weight of the saved model from the last checkpoint, in the dtype in which it is saved."""
    refusal: str = ""
    """Sentence with which the run ended."""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        if len(self.differences) != UPDATES or self.saved != 0.0:
            return False
        if not self.floors:
            return max(self.differences) < BOUND and self.moved > MOVED * max(self.differences)
        engine = max(difference / floor for difference, floor in zip(self.differences, self.floors, strict=True))
        trainer = max(difference / floor for difference, floor in zip(self.trained, self.floors, strict=True))
        return engine < FLOORS and trainer < BETWEEN and self.moved > MOVED_IN_BF16 * max(self.differences)


def prove(one: Published, directory: Path, *, mode: str = "float32", python: str = sys.executable) -> Proof:
    """Train a family and compare it. python: program that runs scripts/train.py."""
    facts = {"family": one.family, "checkpoint": one.checkpoint, "model_type": one.config["model_type"], "mode": mode}
    facts["versions"] = _versions()
    try:
        model = save_model(one, directory / "model")
    except (TypeError, ValueError, ImportError, RuntimeError, AttributeError, KeyError) as error:
        return Proof(**facts, refusal=f"transformers: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    result = _train(model, directory, MODES[mode], python)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines()
        messages = [line for line in lines if line.startswith("lockstep:")] or lines[-1:]
        log = directory / "runs/run/logs/engine.log"
        causes = re.findall(r"^(?!ValueError: I/O)\w*Error: .*$", log.read_text(), re.MULTILINE) if log.exists() else []
        if "could not start" in messages[0] and causes:
            messages = [f"vLLM: {causes[0]}"]
        sentence = messages[0].removeprefix("lockstep: ").replace(str(model), "<model>")
        return Proof(**facts, refusal=f"exit status {result.returncode}: {sentence}")
    run = directory / "runs/run"
    if MODES[mode].has_v2 and "Using V2 Model Runner" not in (run / "logs/engine.log").read_text():
        return Proof(**facts, refusal="the engine had another model runner than V2")
    exact = plain_model(model)
    half = plain_model(model, dtype=torch.bfloat16) if MODES[mode].dtype == "bfloat16" else None
    size = Tensor.max if half is None else Tensor.mean
    differences, floors, moves, tokens, longest = [], [], [], 0, 0
    _load(exact, half, {})
    for step in range(1, UPDATES + 1):
        calls = list(_calls(run / f"rollouts/step-{step:06d}.jsonl"))
        engine_logprobs = torch.cat([torch.tensor(call["sampled_logprobs"]) for call in calls])
        if step > 1:
            moves.append(float(size((_logprobs(exact, calls) - engine_logprobs).abs())))
            _load(exact, half, _checkpoint(run, step - 1, exact))
        plain = _logprobs(exact, calls)
        differences.append(float(size((plain - engine_logprobs).abs())))
        if half is not None:
            floors.append(float(size((plain - _logprobs(half, calls)).abs())))
        tokens += len(engine_logprobs)
        longest = max(longest, *(len(call["prompt_ids"]) + len(call["sampled_ids"]) for call in calls))
    saved_model = AutoModelForCausalLM.from_pretrained(run / "model", dtype="auto")
    weights = _checkpoint(run, UPDATES, plain_model(model))  # frozen ones are not rounded
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    name = "rollout_correction/logp_diff_abs_mean"
    return Proof(
        **facts,
        tokens=tokens,
        longest=longest,
        differences=tuple(differences),
        floors=tuple(floors),
        trained=tuple(line[name] for line in lines if name in line),
        moved=min(moves),
        saved=max(
            float((own.detach() - weights[name].to(own)).abs().max()) for name, own in saved_model.named_parameters()
        ),
    )


def _train(model: Path, directory: Path, mode: Mode, python: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/train.py until it ends."""
    launcher = []
    if mode.ranks > 1:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/zero3.yaml",
                    "--num_processes", str(mode.ranks), "--main_process_port", "0"]  # fmt: skip
    folders = [*([str(V2)] if mode.has_v2 else []), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [python, *launcher, "scripts/train.py", *_settings(model, directory, mode)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON_EXEC": python, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
    )  # fmt: skip


def _settings(model: Path, directory: Path, mode: Mode) -> list[str]:
    """Write data and a reward, and return the settings of the run."""
    (directory / "rows.jsonl").write_text("".join(json.dumps({"prompt": "abc " * n}) + "\n" for n in (1, 2, 5, 9)))
    (directory / "rewards.py").write_text(REWARD)
    return [
        f"model.path={model}", f"data.path={directory}/rows.jsonl", f"reward.functions=[{directory}/rewards.py:even]",
        f"updates={UPDATES}", f"run_root={directory}/runs", "run_name=run", "checkpoint.every=1",
        f"checkpoint.keep={UPDATES}", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
        f"rollout.max_model_len={CONTEXT}", f"rollout.max_tokens_per_turn={mode.answer}", "optimizer.lr=1e-3",
        "logger.print_rollouts_every=0", f"model.dtype={mode.dtype}",
    ]  # fmt: skip


def _checkpoint(run: Path, step: int, model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return the weights of a model, the trained ones from a checkpoint that one rank or several wrote."""
    directory = run / f"checkpoints/step-{step}"
    stage = json.loads((directory / MANIFEST).read_text())["zero_stage"]
    weights: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(model.config)
    # ZeRO-3 loads into a model whose frozen parameters (ERNIE's correction bias) stay so; elsewhere loading thaws them.
    trained_names = [name for name, parameter in fresh.named_parameters() if parameter.requires_grad or stage == 0]
    read = open_state(directory, trained=[f"model.{name}" for name in trained_names], zero_stage=stage)
    return weights | {name: read(f"model.{name}").weight for name in trained_names}


def _load(exact: PreTrainedModel, half: PreTrainedModel | None, weights: Mapping[str, Tensor]) -> None:
    """Put trained weights into both models: into the exact one as the other one rounds them."""
    (half or exact).load_state_dict(dict(weights), strict=False)
    if half is not None:
        exact.load_state_dict({name: tensor.float() for name, tensor in half.named_parameters()}, strict=False)


def _calls(rollouts: Path) -> Iterable[dict[str, Any]]:
    return (call for line in rollouts.read_text().splitlines() for call in json.loads(line)["calls"])


@torch.no_grad()
def _logprobs(model: PreTrainedModel, calls: Iterable[Mapping[str, Any]]) -> Tensor:
    """Return the log π of all sampled tokens, each row computed alone."""
    rows = []
    for call in calls:
        prompt, sampled_ids = call["prompt_ids"], call["sampled_ids"]
        logits = model(torch.tensor([[*prompt, *sampled_ids]])).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.float().log_softmax(-1).gather(-1, torch.tensor(sampled_ids)[:, None])[:, 0])
    return torch.cat(rows)


def _versions() -> dict[str, str]:
    packages = ("vllm", "torch", "transformers")  # `vllm` is the module; its CPU build has another name
    return {name: importlib.import_module(name).__version__.partition("+")[0] for name in packages}


def record(proofs: list[Proof]) -> None:
    """Write proofs to docs/published_models.json, over earlier ones of the same families and modes."""
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    by_key = {(proof["family"], proof["mode"]): proof for proof in [*earlier, *map(asdict, proofs)]}
    ordered_proofs = [
        by_key[family, mode] for family in published_models() for mode in MODES if (family, mode) in by_key
    ]
    RESULTS.write_text(json.dumps(ordered_proofs, indent=1) + "\n")


def main() -> int:
    everything = published_models()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"default: all {len(everything)}")
    parser.add_argument("--mode", choices=MODES, default="float32")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := [name for name in options.families if name not in everything]:
        parser.error(f"{unknown[0]} is none of: {', '.join(everything)}")
    proofs = []
    for name in options.families or everything:
        with tempfile.TemporaryDirectory() as directory:
            proof = prove(everything[name], Path(directory), mode=options.mode)
        proofs.append(proof)
        numbers = " ".join(f"{value:.1e}" for value in proof.differences)
        print(f"{'exact ' if proof.is_exact else 'NOT   '} {name:28s} {numbers} {proof.refusal}", flush=True)
        if options.record:
            record([proof])
    return 0 if all(proof.is_exact for proof in proofs) else 1


if __name__ == "__main__":
    sys.exit(main())
