"""Results of an evaluation: per prompt, per data set, and between two models. Written to JSON and read back."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout.errors import DataError
from rollout.records import Rollout, RolloutStatus
from trainer.evaluate import estimates
from trainer.evaluate.estimates import Estimate

SCHEMA = 1
"""Of the JSON file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """All samples of one prompt, in the order of their seeds."""

    prompt: str
    """Digest of the data row: equal for the same row in another evaluation."""
    label: str | None
    """What the results are broken down by, for instance the environment; None: the row does not say."""
    rewards: tuple[float, ...]
    """Of a rollout that failed: 0."""
    passed: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.rewards or len(self.rewards) != len(self.passed):
            raise DataError(f"prompt {self.prompt}: {len(self.rewards)} rewards and {len(self.passed)} verdicts")

    @property
    def mean_reward(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)

    def pass_at(self, k: int) -> float:
        return estimates.pass_at_k(len(self.passed), sum(self.passed), k)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One data set under one model."""

    name: str
    """Empty for data.heldout_path."""
    prompts: tuple[PromptResult, ...]
    facts: Mapping[str, float]
    """Means over rollouts: tokens, turns, single reward functions, how episodes ended."""

    @property
    def num_samples(self) -> int:
        """Per prompt."""
        return len(self.prompts[0].rewards)

    @property
    def title(self) -> str:
        return self.name or "held-out data"

    def rewards(self) -> Estimate:
        """mean@n: the mean reward over the n samples of a prompt, over prompts."""
        return estimates.mean([prompt.mean_reward for prompt in self.prompts])

    def pass_rates(self) -> dict[int, Estimate]:
        """pass@k by k."""
        return {
            k: estimates.proportion(
                [prompt.pass_at(k) for prompt in self.prompts], trials_per_value=self.num_samples // k
            )
            for k in estimates.ks_of(self.num_samples)
        }

    def by_label(self) -> dict[str, SetResult]:
        """The same per label, in the order of first appearance; facts are of the whole set and are left out."""
        labels = dict.fromkeys(prompt.label for prompt in self.prompts if prompt.label is not None)
        return {
            label: SetResult(
                name=label, prompts=tuple(prompt for prompt in self.prompts if prompt.label == label), facts={}
            )
            for label in labels
        }

    def metrics(self) -> dict[str, float]:
        """`eval/*`, or `eval/<name>/*`: values, the bounds of their 95 % intervals, and facts."""
        prefix = f"eval/{self.name}/" if self.name else "eval/"
        reward = self.rewards()
        found = {
            "reward_mean": reward.value,
            "reward_stderr": estimates.standard_error([prompt.mean_reward for prompt in self.prompts]),
            "prompts": float(len(self.prompts)),
            "rollouts": float(len(self.prompts) * self.num_samples),
            **self.facts,
        }
        for k, rate in self.pass_rates().items():
            found |= {f"pass@{k}": rate.value, f"pass@{k}_low": rate.low, f"pass@{k}_high": rate.high}
        labelled = self.by_label()
        for label, part in labelled.items() if len(labelled) > 1 else ():
            found |= {f"{label}/reward_mean": part.rewards().value, f"{label}/pass@1": part.pass_rates()[1].value}
        return {f"{prefix}{name}": value for name, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same prompts with the same seeds."""

    name: str
    prompts: int
    reward: Estimate
    """Second minus first, paired by prompt."""
    pass_rates: Mapping[int, Estimate]
    better: int
    """Prompts on which the second has the higher mean reward."""
    worse: int

    @property
    def title(self) -> str:
        return self.name or "held-out data"


def prompt_results(
    rollouts: Iterable[Rollout], *, label_column: str, pass_reward: str | None, pass_threshold: float
) -> tuple[PromptResult, ...]:
    """By prompt. A rollout passes if its reward, or that of the function `pass_reward`, reaches the threshold."""
    by_prompt: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_prompt.setdefault(rollout.group_id, []).append(rollout)

    def passed(rollout: Rollout) -> bool:
        deciding = rollout.reward if pass_reward is None else rollout.rewards.get(pass_reward, -math.inf)
        return rollout.is_trainable and deciding >= pass_threshold

    results = []
    for samples in by_prompt.values():
        example = samples[0].example
        label = example.get(label_column)
        results.append(
            PromptResult(
                prompt=digest(example),
                label=None if label is None else str(label),
                rewards=tuple(rollout.reward if rollout.is_trainable else 0.0 for rollout in samples),
                passed=tuple(map(passed, samples)),
            )
        )
    return tuple(results)


def rollout_facts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over rollouts, failed ones included; of reward functions over those that they had an opinion on."""
    count = len(rollouts)
    facts = {
        "sampled_tokens_mean": sum(rollout.num_sampled for rollout in rollouts) / count,
        "turns_mean": sum(rollout.num_turns for rollout in rollouts) / count,
    }
    for name in dict.fromkeys(name for rollout in rollouts for name in rollout.rewards):
        values = [rollout.rewards[name] for rollout in rollouts if name in rollout.rewards]
        facts[f"reward/{name}/mean"] = math.fsum(values) / len(values)
    for status in RolloutStatus:
        facts[f"{status}_fraction"] = sum(rollout.status is status for rollout in rollouts) / count
    return facts


def digest(example: Mapping[str, Any]) -> str:
    text = json.dumps(dict(example), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def compare(first: Sequence[SetResult], second: Sequence[SetResult]) -> list[Comparison]:
    """Paired differences on every set that both have, second minus first.

    Raises:
        DataError: no set is in both, or a set has other prompts or another number of samples.
    """
    before = {result.name: result for result in first}
    pairs = [(before[result.name], result) for result in second if result.name in before]
    if not pairs:
        raise DataError(
            f"nothing to compare: one evaluation has {_titles(first)}, the other has {_titles(second)}; evaluate both "
            "on the same data sets"
        )
    return [_compare(one, other) for one, other in pairs]


def _compare(first: SetResult, second: SetResult) -> Comparison:
    differs = [prompt.prompt for prompt in first.prompts] != [prompt.prompt for prompt in second.prompts]
    if differs or first.num_samples != second.num_samples:
        raise DataError(
            f"{second.title}: {len(first.prompts)} prompts x {first.num_samples} samples cannot be compared with "
            f"{len(second.prompts)} x {second.num_samples}"
            + (" other prompts" if differs else "")
            + "; evaluate both with the same data, eval.prompts and eval.samples_per_prompt"
        )
    pairs = list(zip(first.prompts, second.prompts, strict=True))
    return Comparison(
        name=second.name,
        prompts=len(pairs),
        reward=estimates.paired_difference([a.mean_reward for a, _ in pairs], [b.mean_reward for _, b in pairs]),
        pass_rates={
            k: estimates.paired_difference([a.pass_at(k) for a, _ in pairs], [b.pass_at(k) for _, b in pairs])
            for k in estimates.ks_of(second.num_samples)
        },
        better=sum(b.mean_reward > a.mean_reward for a, b in pairs),
        worse=sum(b.mean_reward < a.mean_reward for a, b in pairs),
    )


def _titles(results: Sequence[SetResult]) -> str:
    return ", ".join(result.title for result in results) or "none"


def write_results(
    path: Path,
    results: Sequence[SetResult],
    *,
    model: str,
    settings: Mapping[str, Any],
    comparisons: Sequence[Comparison] = (),
    compared_to: str | None = None,
) -> None:
    """One JSON object: numbers to read, and every prompt's samples to compare with later.

    settings: how was sampled; two evaluations with other settings are not comparable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        "model": model,
        "settings": dict(settings),
        "sets": [
            {
                "name": result.name,
                "metrics": result.metrics(),
                "facts": dict(result.facts),
                "prompts": [asdict(prompt) for prompt in result.prompts],
            }
            for result in results
        ],
    }
    if compared_to is not None:
        content["comparison"] = {"with": compared_to, "sets": [_finite(asdict(item)) for item in comparisons]}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_results(path: Path, settings: Mapping[str, Any]) -> list[SetResult]:
    """What `write_results` wrote.

    Raises:
        DataError: the file is not one, or its samples were drawn with other settings than these.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise DataError(f"{path} has schema {content['schema']}, this version reads {SCHEMA}; evaluate again")
        results = [
            SetResult(
                name=item["name"],
                prompts=tuple(
                    PromptResult(
                        prompt=prompt["prompt"],
                        label=prompt["label"],
                        rewards=tuple(map(float, prompt["rewards"])),
                        passed=tuple(map(bool, prompt["passed"])),
                    )
                    for prompt in item["prompts"]
                ),
                facts=item["facts"],
            )
            for item in content["sets"]
        ]
        found = dict(content["settings"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is not the result of an evaluation ({type(error).__name__}: {error}); write one with "
            "scripts/evaluate.py eval.output=<file.json>"
        ) from error
    other = [name for name in settings if found.get(name) != settings[name]]
    if other:
        raise DataError(
            f"{path} was sampled with {', '.join(f'{name}={found.get(name)}' for name in other)}, this evaluation with "
            f"{', '.join(f'{name}={settings[name]}' for name in other)}; evaluate both with the same settings"
        )
    return results


def _finite(value: Any) -> Any:
    """JSON knows no infinity: null."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
