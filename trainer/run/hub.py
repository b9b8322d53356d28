"""The trained model on the hub, with a card that says how it came about. Off unless `hub.repo` is set.

The card holds what others need to judge the model: base model, data, rewards, algorithm, the last evaluation with its
intervals. It holds no path of this machine and nothing of the configuration beside that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import yaml
from huggingface_hub.errors import HfHubHTTPError

from rollout.errors import HubError
from trainer.config.schema import Config
from trainer.data.datasets import is_file
from trainer.observe.saved_metrics import read_metrics

CARD = "README.md"


def push(model: Path, config: Config, metrics: Mapping[str, float]) -> str:
    """Write the card beside the weights and upload the directory; returns the address.

    metrics: the last that the run has of each name.
    Raises `HubError` if the hub refuses or cannot be reached; the model stays where it is.
    """
    repo = config.hub.repo
    assert repo is not None, "nothing is uploaded unless hub.repo says where"
    (model / CARD).write_text(model_card(config, metrics), encoding="utf-8")
    try:
        api = huggingface_hub.HfApi()  # the token is that of `hf auth login`, or HF_TOKEN
        address = api.create_repo(repo, private=config.hub.private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(model), commit_message=f"{config.updates} updates")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise HubError(
            f"hub.repo={repo}: the upload failed ({str(error).splitlines()[0]}); the model is in {model}, try again "
            f"with: hf upload {repo} {model}"
        ) from error
    return str(address)


def model_card(config: Config, metrics: Mapping[str, float]) -> str:
    """Markdown with the front matter that the hub reads."""
    data = [data_set.path for data_set in config.data.training_sets().values()]
    base = _public(config.model.path)
    front = {
        "base_model": base,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lockstep", "reinforcement-learning", config.algorithm.name],
        "datasets": [path for path in data if not is_file(path)],
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
        "longest answer": f"{rollout.max_tokens_per_turn} tokens per turn, {config.environment.max_turns} turns",
        "learning rate": f"{config.optimizer.lr:g} ({config.optimizer.name}, {config.optimizer.schedule})",
        "adapters": f"LoRA of rank {config.model.lora.rank}, merged" if config.model.lora.rank else "none",
        "seed": str(config.seed),
    }
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {(config.hub.repo or base).rpartition('/')[2]}",
        "",
        f"{base}, trained with reinforcement learning by Lockstep.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
        *_evaluation(config, metrics),
    ]
    return "\n".join(lines).rstrip() + "\n"


def last_metrics(path: Path) -> dict[str, float]:
    """The last value of every metric in a run's metrics.jsonl; empty if there is none. Raises `DataError`."""
    found: dict[str, float] = {}
    for line in read_metrics(path) if path.is_file() else ():
        found |= {name: value for name, value in line.items() if value is not None}
    return found


def _evaluation(config: Config, metrics: Mapping[str, float]) -> list[str]:
    """The last evaluation of each data set, if the run made one."""
    rows = []
    for name, data_set in config.heldout_sets().items():
        prefix = f"eval/{name}/" if name else "eval/"
        if f"{prefix}reward_mean" not in metrics:
            continue
        samples = round(metrics[f"{prefix}rollouts"] / metrics[f"{prefix}prompts"])
        title = _public(data_set.path)
        rows.append(f"| {title} | mean@{samples} | {metrics[f'{prefix}reward_mean']:.3f} | |")
        ks = sorted(int(key.removeprefix(f"{prefix}pass@")) for key in metrics if _is_pass_rate(key, prefix))
        for k in ks:
            low, high = metrics[f"{prefix}pass@{k}_low"], metrics[f"{prefix}pass@{k}_high"]
            rows.append(f"| {title} | pass@{k} | {metrics[f'{prefix}pass@{k}']:.3f} | {low:.3f} to {high:.3f} |")
    if not rows:
        return ["The run made no evaluation."]
    how = "greedy" if config.eval.temperature == 0 else f"temperature {config.eval.temperature:g}"
    return [
        f"Evaluated with these rewards, {how}; intervals are at 95 %, over prompts.",
        "",
        "| data | | value | interval |",
        "|---|---|---|---|",
        *rows,
    ]


def _is_pass_rate(key: str, prefix: str) -> bool:
    return key.startswith(f"{prefix}pass@") and key.removeprefix(f"{prefix}pass@").isdigit()


def _public(path: str) -> str:
    """A hub id as it is; of anything on this machine only the last part."""
    is_local = is_file(path) or path.startswith(("/", ".", "~")) or Path(path).exists()
    return Path(path).name if is_local else path
