"""Train families of models as published, and compare every sampled token with plain transformers.

    python -m scripts.published.prove                   # all, about half a minute each on two cores
    python -m scripts.published.prove "Qwen3" "Phi-4"   # these
    python -m scripts.published.prove --record          # also writes docs/published_models.json, for docs/models.md

Each family is a small model with the config of a public checkpoint (configs.jsonl). `scripts/train.py` trains it for
three updates in float32, on rows longer than its windows, chunks and original lengths. The log-probabilities that the
engine recorded are compared, row by row, with transformers' own model in eager mode, whole logits, under the weights
before the first update, after the first sync and after the second. The saved model is loaded again and compared.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.published import RESULTS
from scripts.published.models import Published, plain_model, published_models, save_model

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 3
CONTEXT = 256
"""Tokens of a row at most, beyond the windows, chunks and original lengths of all configs."""
BOUND = 1e-4
"""Nats. Largest accepted difference of a sampled token; rounding of float32 stays below 2e-5."""
MOVED = 100
"""Least change of a token by each update, as a multiple of the largest difference: otherwise an engine with old weights
would agree, too."""
REWARD = "def even(rollout):\n    return sum(ord(c) % 2 for c in rollout.answer) / max(1, len(rollout.answer))\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Outcome of one family: differences, or why there are none."""

    family: str
    checkpoint: str
    model_type: str
    tokens: int = 0
    """Compared tokens."""
    longest: int = 0
    """Tokens of the longest row."""
    differences: tuple[float, ...] = ()
    """Largest |Δ log π| [nats] of a sampled token: at first, after the first sync, after the second."""
    moved: float = 0.0
    """Largest change of a token's log π by an update, of the update with the smallest one [nats]."""
    saved: float | None = None
    """Largest difference of a weight of the saved model from the last checkpoint."""
    refusal: str = ""
    """Sentence with which the run ended."""

    @property
    def is_exact(self) -> bool:
        agrees = len(self.differences) == UPDATES and max(self.differences) < BOUND
        return agrees and self.moved > MOVED * max(self.differences) and self.saved == 0.0


def prove(one: Published, directory: Path, *, python: str = sys.executable) -> Proof:
    """Train a family and compare it. python: program that runs scripts/train.py."""
    facts = {"family": one.family, "checkpoint": one.checkpoint, "model_type": one.config["model_type"]}
    try:
        model = save_model(one, directory / "model")
    except (TypeError, ValueError, ImportError, RuntimeError, AttributeError, KeyError) as error:
        return Proof(**facts, refusal=f"transformers: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    done = subprocess.run(
        [python, "scripts/train.py", *_settings(model, directory)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        said = [line for line in lines if line.startswith("lockstep:")] or lines[-1:]
        sentence = said[0].removeprefix("lockstep: ").replace(str(model), "<model>")
        return Proof(**facts, refusal=f"exit status {done.returncode}: {sentence}")
    run = directory / "runs/run"
    plain = plain_model(model)
    differences, moves, tokens, longest = [], [], 0, 0
    for step in range(1, UPDATES + 1):
        rollouts = run / f"rollouts/step-{step:06d}.jsonl"
        if step > 1:
            moves.append(_compare(plain, rollouts)[0])
            _load(plain, _checkpoint(run, step - 1))
        step_difference, step_tokens, step_longest = _compare(plain, rollouts)
        differences.append(step_difference)
        tokens, longest = tokens + step_tokens, max(longest, step_longest)
    saved = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    _load(plain, _checkpoint(run, UPDATES))
    return Proof(
        **facts,
        tokens=tokens,
        longest=longest,
        differences=tuple(differences),
        moved=min(moves),
        saved=_distance(saved, plain),
    )


def _settings(model: Path, directory: Path) -> list[str]:
    """Write data and a reward, and return the settings of the run."""
    (directory / "rows.jsonl").write_text("".join(json.dumps({"prompt": "abc " * n}) + "\n" for n in (1, 2, 5, 9)))
    (directory / "rewards.py").write_text(REWARD)
    return [
        f"model.path={model}", f"data.path={directory}/rows.jsonl", f"reward.functions=[{directory}/rewards.py:even]",
        f"updates={UPDATES}", f"run_root={directory}/runs", "run_name=run", "checkpoint.every=1",
        f"checkpoint.keep={UPDATES}", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
        f"rollout.max_model_len={CONTEXT}", f"rollout.max_tokens_per_turn={CONTEXT - 64}", "optimizer.lr=1e-3",
        "logger.print_rollouts_every=0",
    ]  # fmt: skip


def _checkpoint(run: Path, step: int) -> Mapping[str, torch.Tensor]:
    weights = load_file(run / f"checkpoints/step-{step}/parameters.safetensors")
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _load(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Put trained weights into a model. Raises `RuntimeError` for names that it does not have."""
    outcome = model.load_state_dict(dict(weights), strict=False)
    if outcome.unexpected_keys:
        raise RuntimeError(f"the checkpoint has weights that the model lacks: {outcome.unexpected_keys[:3]}")


def _distance(one: PreTrainedModel, other: PreTrainedModel) -> float:
    others: dict[str, Any] = dict(other.named_parameters())
    return max(float((tensor - others[name]).detach().abs().max()) for name, tensor in one.named_parameters())


@torch.no_grad()
def _compare(model: PreTrainedModel, rollouts: Path) -> tuple[float, int, int]:
    """Return the largest difference, the compared tokens and the longest row of a step."""
    worst, tokens, longest = 0.0, 0, 0
    for line in rollouts.read_text().splitlines():
        for call in json.loads(line)["calls"]:
            prompt, sampled = call["prompt_ids"], call["sampled_ids"]
            ids = torch.tensor([[*prompt, *sampled]])
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            plain = logprobs.gather(-1, torch.tensor(sampled)[:, None])[:, 0]
            worst = max(worst, float((plain - torch.tensor(call["sampled_logprobs"])).abs().max()))
            tokens, longest = tokens + len(sampled), max(longest, ids.shape[1])
    return worst, tokens, longest


def record(proofs: list[Proof]) -> None:
    """Write proofs to docs/published_models.json, over earlier ones of the same families."""
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"proofs": []}
    by_family = {proof["family"]: proof for proof in earlier["proofs"]} | {one.family: asdict(one) for one in proofs}
    packages = ("vllm", "torch", "transformers")  # `vllm` is the module; its CPU build has another name
    versions = {name: importlib.import_module(name).__version__.partition("+")[0] for name in packages}
    ordered = [by_family[name] for name in published_models() if name in by_family]
    RESULTS.write_text(json.dumps({"versions": versions, "proofs": ordered}, indent=1) + "\n")


def main() -> int:
    everything = published_models()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"default: all {len(everything)}")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := [name for name in options.families if name not in everything]:
        parser.error(f"{unknown[0]} is none of: {', '.join(everything)}")
    proofs = []
    for name in options.families or everything:
        with tempfile.TemporaryDirectory() as directory:
            proof = prove(everything[name], Path(directory))
        proofs.append(proof)
        numbers = " ".join(f"{value:.1e}" for value in proof.differences)
        print(f"{'exact ' if proof.is_exact else 'NOT   '} {name:28s} {numbers} {proof.refusal}", flush=True)
        if options.record:
            record([proof])
    return 0 if all(proof.is_exact for proof in proofs) else 1


if __name__ == "__main__":
    sys.exit(main())
