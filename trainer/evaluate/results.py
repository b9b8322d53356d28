"""Results of an evaluation: per prompt, per data set, and paired between two models; as JSON files and as tables."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from lockstep.rollout.errors import DataError
from lockstep.rollout.records import Rollout, RolloutStatus
from lockstep.rollout.replies import with_null
from lockstep.rollout.system.plain_files import read_plain
from lockstep.trainer.evaluate import estimates
from lockstep.trainer.evaluate.estimates import Estimate

SCHEMA = 1
"""Version of the JSON file."""
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""Number of a file: sums and squares of it do not overflow."""
NOTE = "value [95 % interval]; pass@k: Wilson over prompts, means and differences: normal over prompts; *: without 0"
"""Last line of a table."""

T = TypeVar("T")


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """All samples of one prompt, in the order of their seeds."""

    prompt: str
    """Digest of the data row, equal across evaluations."""
    label: str | None
    """Value of the breakdown column, for instance the environment; None if the row has none."""
    rewards: tuple[Number, ...]
    """Rewards; 0 for a failed rollout."""
    passed: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not self.rewards or len(self.rewards) != len(self.passed):
            raise DataError(f"prompt {self.prompt}: found {len(self.rewards)} rewards and {len(self.passed)} verdicts")

    @property
    def mean_reward(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)

    def pass_at(self, k: int) -> float:
        return estimates.pass_at_k(len(self.passed), sum(self.passed), k)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One data set under one model."""

    name: str
    """Name of the set; empty for data.heldout_path."""
    prompts: tuple[PromptResult, ...]
    facts: Mapping[str, Number]
    """Means over rollouts: tokens, turns, single reward functions, statuses."""

    @property
    def num_samples(self) -> int:
        """Number of samples per prompt."""
        return len(self.prompts[0].rewards)

    def rewards(self) -> Estimate:
        """Return mean@n: the mean over prompts of the mean reward of their n samples."""
        return estimates.mean([prompt.mean_reward for prompt in self.prompts])

    def pass_rates(self) -> dict[int, Estimate]:
        """Return pass@k by k."""
        return {
            k: estimates.proportion(
                [prompt.pass_at(k) for prompt in self.prompts], trials_per_value=self.num_samples // k
            )
            for k in estimates.ks_of(self.num_samples)
        }

    def by_label(self) -> dict[str, SetResult]:
        """Split by label, in order of first appearance, without facts, which exist only for the whole set."""
        labels = dict.fromkeys(prompt.label for prompt in self.prompts if prompt.label is not None)
        return {
            label: SetResult(
                name=label, prompts=tuple(prompt for prompt in self.prompts if prompt.label == label), facts={}
            )
            for label in labels
        }

    def metrics(self) -> dict[str, float]:
        """Return `eval/*`, or `eval/<name>/*`: values, bounds of their 95 % intervals, and facts."""
        reward = self.rewards()
        values = {
            "reward_mean": reward.value,
            "reward_stderr": estimates.standard_error([prompt.mean_reward for prompt in self.prompts]),
            "prompts": float(len(self.prompts)),
            "rollouts": float(len(self.prompts) * self.num_samples),
            **self.facts,
        }
        for k, rate in self.pass_rates().items():
            values |= {f"pass@{k}": rate.value, f"pass@{k}_low": rate.low, f"pass@{k}_high": rate.high}
        parts = self.by_label()
        for label, part in parts.items() if len(parts) > 1 else ():
            values |= {f"{label}/reward_mean": part.rewards().value, f"{label}/pass@1": part.pass_rates()[1].value}
        return {_prefix(self.name) + name: value for name, value in values.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same prompts with the same seeds, or on the same documents of a task."""

    name: str
    unit: str
    """Prompts or documents, the things that are compared one by one."""
    count: int
    differences: Mapping[str, Estimate]
    """Second minus first by measure; the only one of a task has no name. Empty if documents do not determine it."""
    better: int
    """Number of units on which the second model is better: the mean reward of a prompt, the value of a document."""
    worse: int

    @classmethod
    def of(cls, name: str, unit: str, differences: Mapping[str, Estimate], gains: Sequence[float]) -> Comparison:
        """gains: of the second model, by unit."""
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        return cls(name=name, unit=unit, count=len(gains), differences=differences, better=better, worse=worse)

    def metrics(self) -> dict[str, float]:
        """Return `eval/<name>/difference/<measure>`, without a name or a measure that is empty."""
        parts = {measure: filter(None, ("eval", self.name, "difference", measure)) for measure in self.differences}
        return {"/".join(parts[measure]): estimate.value for measure, estimate in self.differences.items()}


def _prefix(name: str) -> str:
    return f"eval/{name}/" if name else "eval/"


def prompt_results(
    rollouts: Iterable[Rollout], *, label_column: str, pass_reward: str | None, pass_threshold: float
) -> tuple[PromptResult, ...]:
    """Group by prompt. A rollout passes if its reward, or that of function `pass_reward`, reaches the threshold."""
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
        text = json.dumps(dict(example), sort_keys=True, default=str)
        results.append(
            PromptResult(
                prompt=hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest(),
                label=None if label is None else str(label),
                rewards=tuple(rollout.reward if rollout.is_trainable else 0.0 for rollout in samples),
                passed=tuple(map(passed, samples)),
            )
        )
    return tuple(results)


def rollout_facts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return means over rollouts, including failed ones; of a reward function over the rollouts it scored."""
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


def common(first: Sequence[Named], second: Sequence[Named]) -> list[tuple[Named, Named]]:
    """Return the results that both evaluations have, in pairs. Raises `DataError` if there are none."""
    before = {result.name: result for result in first}
    pairs = [(before[result.name], result) for result in second if result.name in before]
    if not pairs:
        names = (", ".join(title(result.name) for result in results) or "none" for results in (first, second))
        raise DataError(
            f"nothing to compare: one evaluation has {next(names)}, the other has {next(names)}; evaluate both on the "
            "same data sets and tasks"
        )
    return pairs


def compare(first: Sequence[SetResult], second: Sequence[SetResult]) -> list[Comparison]:
    """Compare paired by prompt on every set that both have, second minus first.

    Raises `DataError` without a common set, or for a set with other prompts or another number of samples.
    """
    return [_compare(one, other) for one, other in common(first, second)]


def _compare(first: SetResult, second: SetResult) -> Comparison:
    differs = [prompt.prompt for prompt in first.prompts] != [prompt.prompt for prompt in second.prompts]
    if differs or first.num_samples != second.num_samples:
        raise DataError(
            f"{title(second.name)}: {len(first.prompts)} prompts x {first.num_samples} samples cannot be compared with "
            f"{len(second.prompts)} x {second.num_samples}"
            + (" other prompts" if differs else "")
            + "; evaluate both with the same data, eval.prompts and eval.samples_per_prompt"
        )
    pairs = list(zip(first.prompts, second.prompts, strict=True))
    gains = [b.mean_reward - a.mean_reward for a, b in pairs]
    rates = {
        f"pass@{k}": estimates.paired_difference([a.pass_at(k) for a, _ in pairs], [b.pass_at(k) for _, b in pairs])
        for k in estimates.ks_of(second.num_samples)
    }
    rewards = estimates.paired_difference([a.mean_reward for a, _ in pairs], [b.mean_reward for _, b in pairs])
    return Comparison.of(second.name, "prompts", {"reward_mean": rewards, **rates}, gains)


def write_results(
    path: Path,
    results: Sequence[SetResult],
    *,
    model: str,
    settings: Mapping[str, Any],
    comparisons: Sequence[Comparison] = (),
    compared_to: str | None = None,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Write metrics and every prompt's samples as one JSON object.

    settings: see `comparable_settings`. others: further entries, of other kinds of results.
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
        content["comparison"] = {"with": compared_to, "results": with_null([asdict(item) for item in comparisons])}
    content |= others or {}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """The part of a file that is read again."""

    settings: dict[str, Any]
    sets: list[SetResult]


def read_results(path: Path, settings: Mapping[str, Any]) -> list[SetResult]:
    """Read a file of `write_results`. Raises `DataError` for other files, and for samples with other settings."""
    content = read_as(_File, path)
    for result in content.sets:
        if len({len(prompt.rewards) for prompt in result.prompts}) != 1:
            raise _other_file(path, f"{title(result.name)}: expected prompts with the same number of samples each")
    prior = content.settings
    other = [name for name in settings if prior.get(name) != settings[name]]
    if other:
        raise DataError(
            f"{path} was sampled with {', '.join(f'{name}={prior.get(name)}' for name in other)}, this evaluation with "
            f"{', '.join(f'{name}={settings[name]}' for name in other)}; evaluate both with the same settings"
        )
    return content.sets


def read_as(kind: type[T], path: Path) -> T:
    """Read the fields of a record from a file of `write_results`. Raises `DataError` for other files."""
    try:
        text = read_plain(path)
        schema = json.loads(text)["schema"]
        if schema == SCHEMA:
            return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise _other_file(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _other_file(path, f"{type(error).__name__}: {error}") from error
    raise DataError(f"{path} has schema {schema}, this version reads {SCHEMA}; evaluate again")


def _other_file(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} is not the result of an evaluation ({problem}); write one with lockstep evaluate "
        "eval.output=<file.json>"
    )


def result_lines(results: Sequence[SetResult]) -> Iterator[str]:
    """Yield a table with a line per data set, followed by one per label."""
    width = max(len(title) for title, _ in _rows(results))
    for result in results:
        ks = tuple(result.pass_rates())
        names = [f"mean@{result.num_samples}", *(f"pass@{k}" for k in ks)]
        yield "  ".join([f"{'':{width}}", f"{'prompts':>7}", *(f"{name:<21}" for name in names)]).rstrip()
        for title, part in _rows([result]):
            cells = [str(part.rewards()), *map(str, part.pass_rates().values())]
            line = [f"{title:{width}}", f"{len(part.prompts):>7}", *(f"{cell:<21}" for cell in cells)]
            yield "  ".join(line).rstrip()
        cut = result.facts.get("truncated_fraction", 0) + result.facts.get("context_full_fraction", 0)
        yield (
            f"{'':{width}}  {result.facts['sampled_tokens_mean']:.0f} tokens and {result.facts['turns_mean']:.1f} "
            f"turns per rollout, {cut:.1%} cut off, {result.facts['failed_fraction']:.1%} failed"
        )
    yield NOTE


def comparison_lines(comparisons: Sequence[Comparison], first: str, second: str) -> Iterator[str]:
    """Yield the differences from the first model to the second, paired by prompt or by document."""
    for unit, items in groupby(comparisons, key=lambda item: item.unit):
        yield f"{second} minus {first}, on the same {unit}{' with the same seeds' if unit == 'prompts' else ''}"
        for item in items:
            cells = [f"{name.removesuffix('_mean')} {signed(one)}".strip() for name, one in item.differences.items()]
            yield f"{title(item.name)}  {'  '.join(cells) or 'no paired difference of a corpus metric'}"
            same = item.count - item.better - item.worse
            indent = " " * len(title(item.name))
            yield f"{indent}  better on {item.better} {unit}, worse on {item.worse}, equal on {same}"


def title(name: str) -> str:
    """Return the displayed name of a data set."""
    return name or "held-out data"


def _rows(results: Sequence[SetResult]) -> Iterator[tuple[str, SetResult]]:
    for result in results:
        yield title(result.name), result
        parts = result.by_label()
        if len(parts) > 1:
            yield from ((f"  {label}", part) for label, part in parts.items())


def signed(estimate: Estimate) -> str:
    mark = "" if estimate.low <= 0 <= estimate.high else " *"
    return f"{estimate.text('+.3f')}{mark}"
