"""Upload of the trained model to the Hugging Face hub with a model card, if `hub.repo` is set.

The card holds base model, data, rewards, algorithm, and the last evaluation with its intervals. It holds no local paths
and no other settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import yaml
from huggingface_hub.errors import HfHubHTTPError

from lockstep.rollout.errors import HubError
from lockstep.trainer.config.groups.data_settings import SAVED_ROLLOUTS, DataSetConfig
from lockstep.trainer.config.groups.outputs_settings import HubConfig
from lockstep.trainer.config.redaction import redact_text
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.datasets import is_file, is_made
from lockstep.trainer.observe.metrics_log import read_metrics

CARD = "README.md"


def push(model: Path, settings: HubConfig, *, card: str, updates: int) -> str:
    """Upload weights and card, and return the address. updates: of the model, for the message of the commit.

    Raises `HubError` if the hub refuses or cannot be reached; the local model is unchanged.
    """
    repo = settings.repo
    assert repo is not None, "call only with hub.repo set"
    (model / CARD).write_text(card, encoding="utf-8")
    try:
        api = huggingface_hub.HfApi()  # the token is that of `hf auth login`, or HF_TOKEN
        address = api.create_repo(repo, private=settings.private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(model), commit_message=f"{updates} updates")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise HubError(
            f"hub.repo={repo}: the upload failed ({str(error).splitlines()[0]}); the model is in {model}; upload it "
            f"with: hf upload {repo} {model}"
        ) from error
    return str(address)


def model_card(config: Config, metrics: Mapping[str, float]) -> str:
    """Return the card as Markdown, with the front matter that the hub reads. metrics: last value of each metric of the
    run."""
    sets = config.data.training_sets().values()
    data = [data_set.path for data_set in sets]
    base = _public(config.model.path)
    front = {
        "base_model": base,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lockstep", "reinforcement-learning", config.algorithm.name],
        "datasets": [
            redact_text(one.path) for one in sets if not (one.is_saved or is_file(one.path) or is_made(one.path))
        ],
    }
    front = {name: value for name, value in front.items() if value}
    rollout = config.rollout
    facts = {
        "base model": base,
        "data": ", ".join(_public(path) for path in data),
        "environment": config.environment.name.rpartition("/")[2],
        "rewards": ", ".join(spec.rpartition("/")[2] for spec in config.reward.functions),
        "algorithm": config.algorithm.name,
        "rollout correction": config.correction.mode,
        "updates": str(config.updates),
        "rollouts per batch": f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples",
        "longest answer": f"{rollout.max_tokens_per_turn} tokens per turn, {config.max_turns} turns",
        "learning rate": f"{config.optimizer.peak_lr:g} ({config.optimizer.name}, {config.optimizer.schedule})",
        "adapters": f"LoRA of rank {config.model.lora.rank}" if config.model.lora.rank else "none",
        "seed": str(config.seed),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False).strip()}\n---\n\n"
        f"# {(config.hub.repo or base).rpartition('/')[2]}\n\n"
        f"{base}, trained with reinforcement learning by Lockstep.\n\n"
        f"| | |\n|---|---|\n{table}\n\n{_evaluation(config.heldout_sets(), config.eval.temperature, metrics)}\n"
    )


def last_metrics(path: Path) -> dict[str, float]:
    """Return the last value of every metric in metrics.jsonl; empty without a file. Raises `DataError`."""
    lines = read_metrics(path) if path.is_file() else ()
    return {name: value for line in lines for name, value in line.items() if value is not None}


def _evaluation(sets: Mapping[str, DataSetConfig], temperature: float, metrics: Mapping[str, float]) -> str:
    """Return the section on the last evaluation of each data set."""
    rows = []
    for name, data_set in sets.items():
        prefix = f"eval/{name}/" if name else "eval/"
        if f"{prefix}reward_mean" not in metrics:
            continue
        samples = round(metrics[f"{prefix}rollouts"] / metrics[f"{prefix}prompts"])
        title = _public(data_set.path)
        rows.append(f"| {title} | mean@{samples} | {metrics[f'{prefix}reward_mean']:.3f} | |")
        matches = (re.fullmatch(rf"{re.escape(prefix)}pass@(\d+)", key) for key in metrics)
        for k in sorted(int(match[1]) for match in matches if match):
            low, high = metrics[f"{prefix}pass@{k}_low"], metrics[f"{prefix}pass@{k}_high"]
            rows.append(f"| {title} | pass@{k} | {metrics[f'{prefix}pass@{k}']:.3f} | {low:.3f} to {high:.3f} |")
    if not rows:
        return "The run was not evaluated."
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    head = f"Evaluated with these rewards, {how}; intervals are at 95 %, over prompts."
    return "\n".join([head, "", "| data | | value | interval |", "|---|---|---|---|", *rows])


def _public(path: str) -> str:
    """Return a hub id or an address without its secrets, and only the last part of a local path."""
    is_local = is_file(path) or path.startswith(("/", ".", "~", SAVED_ROLLOUTS)) or Path(path).exists()
    return redact_text(Path(path).name if is_local else path)
