"""What a run would do, without doing it: `scripts/train.py dry_run=true`. No engine starts, no weights are read.

Covered: every check of the settings (they came before this), the model's architecture and tokenizer, the data file,
the first rows through the environment, the chat template and the reward functions, the counts of the run, the memory
it will take. Not covered: whether the engine starts, and whether the weights can be read.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rewards.resolve import MODEL
from rollout.chat.chat import Chat
from rollout.environments import make_environment
from rollout.environments.mixed import environment_of
from rollout.episode.environment import Environment, RunsItself
from rollout.episode.rows import rows_from_calls
from rollout.records import Rollout, TrainingRow
from rollout.system.background_loop import BackgroundLoop
from rollout.system.terminal_text import terminal_safe
from trainer.build import make_chat, make_rewards, make_sampling
from trainer.config.redaction import redact_words
from trainer.config.schema import Config
from trainer.config.tree import plain, settings_tree
from trainer.data.prompt_filter import make_prompts
from trainer.data.prompts import Row
from trainer.diagnosis.token_classes import TokenTexts
from trainer.distributed.distributed import Distributed
from trainer.model.memory_plan import GIB, advice, memory_plan
from trainer.model.shape import planned_shape
from trainer.observe.transcript import conversation
from trainer.run.library_logs import quiet_third_parties
from trainer.tools.rehearsal import Rehearsal, rehearse
from trainer.tools.run_counts import RunArithmetic

SHOWN_ROWS = 2
MAX_SHOWN_TOKENS = 1500
"""Of a row; longer ones are shown without their middle."""
SLOW_REWARDS = (MODEL, "llm_judge")
"""Reward functions that load weights or ask another machine."""


def dry_run(config: Config) -> None:
    """Look at everything and print it; a collective. Raises `LockstepError` for what would end the run."""
    quiet_third_parties()
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    try:
        with BackgroundLoop() as loop:
            _DryRun(config, distributed, loop).show()
    finally:
        distributed.close()


class _DryRun:
    def __init__(self, config: Config, distributed: Distributed, loop: BackgroundLoop) -> None:
        self._config = config
        self._distributed = distributed
        self._loop = loop
        self._console = Console(highlight=False, quiet=not distributed.is_main)

    def show(self) -> None:
        config = self._config
        chat = make_chat(config)
        prompts = make_prompts(config, self._distributed, self._loop, chat, say=self._say)
        self._console.print(settings_tree(plain(config)))
        self._show_arithmetic(len(prompts))
        self._show_memory()
        self._show_rows(chat, prompts.take(min(SHOWN_ROWS, len(prompts))))
        overrides = shlex.join(redact_words([word for word in sys.argv[1:] if not word.startswith("dry_run=")]))
        self._console.print(Rule(style="dim"))
        self._console.print("Nothing speaks against this run. To start it, leave dry_run out:", style="bold")
        launcher = "python" if self._distributed.world_size == 1 else "accelerate launch ..."
        self._console.print(f"{launcher} {shlex.quote(sys.argv[0])} {overrides}", markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def _show_arithmetic(self, data_rows: int) -> None:
        self._console.print(Rule("[bold]counts[/bold]", style="dim", align="left"))
        arithmetic = RunArithmetic.of(self._config, ranks=self._distributed.world_size)
        table = Table.grid(padding=(0, 2))
        for name, count in arithmetic.lines(data_rows=data_rows):
            table.add_row(Text(name, style="dim"), Text(count))
        self._console.print(table)

    def _show_memory(self) -> None:
        """The plan of the run, from shapes alone."""
        distributed = self._distributed
        shape = planned_shape(self._config)
        plan = memory_plan(
            shape,
            self._config,
            world_size=distributed.world_size,
            zero_stage=distributed.zero_stage,
            uses_deepspeed=distributed.uses_deepspeed,
        )
        title = (
            f"[bold]memory[/bold], an estimate for rank 0; {shape.parameters:,} parameters, {shape.trained:,} trained"
        )
        self._console.print(Rule(title, style="dim", align="left"))
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(justify="right")
        for name, size in plan.parts().items():
            table.add_row(Text(name, style="dim"), f"{size / GIB:.3f} GiB")
        table.add_row(Text("in all", style="bold"), Text(f"{plan.total / GIB:.3f} GiB", style="bold"))
        table.add_row(Text("there is", style="dim"), f"{distributed.device_memory / GIB:.3f} GiB")
        self._console.print(table)
        warning = advice(plan, self._config, available=distributed.device_memory, zero_stage=distributed.zero_stage)
        if warning is not None:
            self._console.print(Text.assemble(("! ", "yellow"), warning))

    def _show_rows(self, chat: Chat, rows: Sequence[Row]) -> None:
        """The first prompts of the run as training rows, with their mask."""
        config = self._config
        self._console.print(Rule("[bold]the first rows of the data[/bold]", style="dim", align="left"))
        environments = [
            environment_of(make_environment(config.environment.name, **config.environment.settings), row)
            for row in rows
        ]
        played = [
            (row, environment)
            for row, environment in zip(rows, environments, strict=True)
            if not isinstance(environment, RunsItself)
        ]
        if len(played) < len(rows):
            self._console.print(
                f"{len(rows) - len(played)} of {len(rows)} rows are for an environment that asks the engine itself, "
                "and there is none in a dry run: they are left out."
            )
        if not played:
            return
        rehearsals = self._loop.run(self._rehearse(chat, played))
        self._console.print(
            "Nothing was sampled: no engine runs. The turns of the assistant are "
            + " and ".join(dict.fromkeys(rehearsal.player for rehearsal in rehearsals))
            + ". Prompt, template, environment, tools, mask and rewards are those of the run.",
            style="italic",
        )
        texts = TokenTexts(chat.tokenizer)
        for rehearsal in rehearsals:
            self._show_rollout(rehearsal.rollout, texts)

    async def _rehearse(self, chat: Chat, played: Sequence[tuple[Row, Environment]]) -> list[Rehearsal]:
        config = self._config
        rehearsals = [
            await rehearse(
                row,
                environment=environment,
                chat=chat,
                sampling=make_sampling(config, chat, temperature=config.rollout.temperature),
                max_turns=config.environment.max_turns,
                max_model_len=config.rollout.max_model_len,
                rollout_id=number,
            )
            for number, (row, environment) in enumerate(played)
        ]
        slow = sorted({*SLOW_REWARDS} & {*config.reward.functions})
        if slow:
            self._console.print(f"Rewards are left out: {', '.join(slow)} would have to be loaded or asked.")
            return rehearsals
        rewards = make_rewards(config)
        try:
            scored = await rewards.score([rehearsal.rollout for rehearsal in rehearsals])
        finally:
            rewards.close()
        return [
            Rehearsal(rollout=rollout, player=rehearsal.player)
            for rollout, rehearsal in zip(scored, rehearsals, strict=True)
        ]

    def _show_rollout(self, rollout: Rollout, texts: TokenTexts) -> None:
        self._console.print()
        self._console.print(conversation(rollout, wrapped=True))
        if rollout.error is not None:
            self._console.print(Text.assemble(("! ", "yellow"), rollout.error))
        for number, row in enumerate(rows_from_calls(rollout.calls)):
            head = f"row {number + 1}: {len(row)} tokens, {row.num_trained} of them trained"
            legend = ("trained", "reverse green") if self._console.color_system else ("⟦trained⟧", "")
            self._console.print(Padding(Text.assemble((head, "bold"), "  ", legend, "  ", ("context", "dim")), (0, 2)))
            marks = ("", "") if self._console.color_system else ("⟦", "⟧")
            self._console.print(Padding(masked_text(row, texts, marks=marks), (0, 4)))


def masked_text(row: TrainingRow, texts: TokenTexts, *, marks: tuple[str, str]) -> Text:
    """The tokens of a row in sequence, trained ones coloured and between `marks`; every other token has a shade of its
    own. What a model or a data file wrote cannot act on the terminal."""
    shown = Text()
    middle = range(MAX_SHOWN_TOKENS // 2, len(row) - MAX_SHOWN_TOKENS // 2)
    was_trained = False
    for position, token in enumerate(row.ids.tolist()):
        if position in middle:
            if position == middle.start:
                shown.append(f"\n... {len(middle)} tokens ...\n", style="italic")
            continue
        is_trained = bool(row.loss_mask[position])
        if is_trained != was_trained:
            shown.append(marks[0] if is_trained else marks[1])
        was_trained = is_trained
        style = ("green" if position % 2 else "bold green") if is_trained else "dim"
        text = texts[token]
        shown.append(terminal_safe(text), style=style)
        shown.append("\n" * text.count("\n"))
    if was_trained:
        shown.append(marks[1])
    return shown
