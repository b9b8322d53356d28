"""Settings of data: `data`, and `demonstrations`, which are trained beside the rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.trainer.config.conditions import (
    CURRICULUM,
    DEMONSTRATED,
    LEARNABILITY,
    MIXED,
    MIXED_SCHEDULE,
    POOLS,
    ROLLOUTS,
    SAVED,
    TAUGHT_DEMONSTRATIONS,
)
from lockstep.trainer.objective.distillation.divergence import DIVERGENCES
from lockstep.trainer.setting import setting

SAVED_ROLLOUTS = "rollouts:"
"""Beginning of a path that names saved rollouts: a run, a directory of their files, or one file."""


@dataclass
class DataSetConfig:
    """Entry of data.sources or eval.sets. Hydra sees dicts, so that `data.sources.new.path=...` needs no `+`;
    `trainer/cli.py` converts their entries."""

    path: str = setting(
        "", "JSONL, JSON, CSV or parquet file, reasoning_gym:<task>, rollouts:<run>, or a hub data set id", is_path=True
    )
    subset: str | None = setting(None, "configuration of a hub data set that has several")
    split: str | None = setting(None, "split of a hub data set; null: data.split, in eval.sets data.heldout_split")
    parameters: dict[str, Any] | None = setting(None, "see data.parameters; null: the same")
    columns: dict[str, str | None] | None = setting(None, "see data.columns; null: the same")
    system_prompt: str | None = setting(None, "see data.system_prompt; null: the same")
    environment: str | None = setting(None, "environment of all its rows, with environment.name=mixed")
    weight: float = setting(1.0, "data.sources: share of the prompts, relative to the other sources", above=0)

    @property
    def is_saved(self) -> bool:
        """True if the path names saved rollouts."""
        return self.path.startswith(SAVED_ROLLOUTS)


@dataclass
class CurriculumConfig:
    rest_epochs: int = setting(
        0, "epochs to leave a row out after its pass rate was too low or too high; 0: no rest", low=0, when=ROLLOUTS
    )
    weighting: str = setting(
        "uniform",
        "how often a row comes, by its pass rate p; uniform: always; learnability: by p(1-p); pools: by whether it is "
        "too hard, solved or in between (docs/data.md)",
        choices=("uniform", "learnability", "pools"),
        when=ROLLOUTS,
    )
    window: int = setting(1, "last visits of a row that count for its pass rate", low=1, when=CURRICULUM)
    min_weight: float = setting(
        0.1, "lowest weight of a row; 1: that of a row with p = 1/2", low=0.01, high=1, when=LEARNABILITY
    )
    hard_weight: float = setting(
        0.5, "weight of rows that are too hard; 1: that of rows in between", low=0.01, high=1, when=POOLS
    )
    solved_weight: float = setting(
        0.1, "weight of rows that are solved; 1: that of rows in between", low=0.01, high=1, when=POOLS
    )
    min_pass_rate: float = setting(0.0, "highest pass rate of rows that are too hard", low=0, high=1, when=CURRICULUM)
    max_pass_rate: float = setting(1.0, "lowest pass rate of rows that are solved", low=0, high=1, when=CURRICULUM)
    solved_reward: float = setting(1.0, "lowest reward of a rollout that passes", when=CURRICULUM)

    @property
    def is_on(self) -> bool:
        """True if rows rest or have weights."""
        return self.rest_epochs > 0 or self.weighting != "uniform"


@dataclass
class DataConfig:
    path: str = setting(
        "",
        "JSONL, JSON, CSV or parquet file, reasoning_gym:<task>, or a hub data set id; with algorithm=sft also "
        "rollouts:<run, directory or file>",
        is_path=True,
        example="data.path=my.jsonl",
    )
    subset: str | None = setting(None, "configuration of a hub data set that has several")
    split: str = setting("train", "split of a hub data set")
    heldout_path: str | None = setting(
        None,
        "file or hub id for evaluation; null: none. That of the demo or of `make real` is left out with other data",
        is_path=True,
    )
    heldout_split: str = setting("test", "split of a hub data set for evaluation")
    parameters: dict[str, Any] = setting(
        {},
        "of reasoning_gym:<task>: settings of the task; size (1000): questions, one in eight held out; seed (0)",
    )
    columns: dict[str, str | None] = setting(
        {},
        "renamed columns, {prompt: question, answer: solution}; `a.b` is column b inside of column a; null leaves a "
        "column out",
    )
    system_prompt: str | None = setting(None, "system message for prompts without one; null: none", when=ROLLOUTS)
    sources: dict[str, Any] = setting({}, "data sets by name, mixed by weight, in place of data.path (docs/data.md)")
    shuffle: bool = setting(True, "draw a new permutation per epoch from `seed`; false: file order")
    max_prompt_tokens: int | None = setting(
        None, "rows with longer prompts are left out, with a report [tokens]", low=1, when=ROLLOUTS
    )
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)

    def training_sets(self) -> dict[str, DataSetConfig]:
        """Return the training sets by name, with inherited settings; the name of data.path is empty."""
        if not self.sources:
            return {"": self.complete(DataSetConfig(path=self.path, subset=self.subset), self.split)}
        return {name: self.complete(source, self.split) for name, source in self.sources.items()}

    def complete(self, data_set: DataSetConfig, split: str) -> DataSetConfig:
        """Return the data set with its inherited settings."""
        return replace(
            data_set,
            split=data_set.split or split,
            parameters=self.parameters if data_set.parameters is None else data_set.parameters,
            columns=self.columns if data_set.columns is None else data_set.columns,
            system_prompt=self.system_prompt if data_set.system_prompt is None else data_set.system_prompt,
        )


@dataclass
class DemonstrationsConfig:
    path: str | None = setting(
        None,
        "conversations whose assistant turns are trained beside the rollouts: JSONL, JSON or parquet file, a hub data "
        "set id, or rollouts:<run, directory or file> (docs/sft.md); null: none",
        is_path=True,
        when=ROLLOUTS,
    )
    subset: str | None = setting(None, "configuration of a hub data set that has several", when=MIXED)
    split: str = setting("train", "split of a hub data set", when=MIXED)
    columns: dict[str, str | None] = setting({}, "renamed columns, {messages: conversations}", when=MIXED)
    rows_per_update: int = setting(16, "conversations per optimizer update, over all ranks", low=1, when=DEMONSTRATED)
    max_tokens: int | None = setting(
        None, "conversations with a longer row are left out, with a report [tokens]", low=2, when=DEMONSTRATED
    )
    min_reward: float | None = setting(None, "lowest reward of saved rollouts that are trained; null: any", when=SAVED)
    teacher_divergence: str = setting(
        "off",
        "loss over the most probable tokens of teacher.path in place of the cross-entropy",
        choices=("off", *DIVERGENCES),
        when=DEMONSTRATED,
    )
    teacher_share: float = setting(
        1.0,
        "share of the divergence in their loss; the rest is the cross-entropy",
        above=0,
        high=1,
        when=TAUGHT_DEMONSTRATIONS,
    )
    weight: float = setting(0.1, "weight of their loss beside the policy loss", low=0, when=MIXED)
    weight_schedule: str = setting(
        "constant", "weight over the updates of the run", choices=("constant", "linear", "cosine"), when=MIXED
    )
    final_weight: float = setting(0.0, "weight at the end of linear and cosine", low=0, when=MIXED_SCHEDULE)
