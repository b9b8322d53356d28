"""Dry run (`lockstep train dry_run=true`): show what a run would do, without an engine and without weights.

Covered: all checks of the settings, the model's architecture and tokenizer, the data files, counts and memory of the
run, the first rows through environment, chat template and reward functions, and all demonstrations as rows.
Not covered: the start of the engine, and reading the weights.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from lockstep.rewards.functions import JUDGES
from lockstep.rewards.functions.answers import ANSWER_COLUMNS
from lockstep.rewards.resolve import MODEL
from lockstep.rollout.chat.chat import Chat
from lockstep.rollout.engine.protocol import Sampling
from lockstep.rollout.environments import make_environment
from lockstep.rollout.environments.declaration import declaration_of
from lockstep.rollout.environments.drivers import turn_by_turn
from lockstep.rollout.environments.mixed import environment_of
from lockstep.rollout.episode.environment import RunsItself, messages_of_row
from lockstep.rollout.episode.episode import run_episode
from lockstep.rollout.episode.rows import rows_from_calls
from lockstep.rollout.errors import ConfigError, LockstepError, TemplateError
from lockstep.rollout.records import Cause, EngineCall, FinishReason, ImageSpan, Rollout, TrainingRow, at_row
from lockstep.rollout.safe_text import terminal_safe
from lockstep.rollout.system.background_loop import BackgroundLoop
from lockstep.trainer.batch.step_batch import StepBatch
from lockstep.trainer.build import images_of_data, make_chat, make_rewards, make_sampling
from lockstep.trainer.checks.names import group_wise_rewards, scores_groups_alone
from lockstep.trainer.command_line import typed_words
from lockstep.trainer.config.groups.task_settings import EnvironmentConfig
from lockstep.trainer.config.redaction import redact_words
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain, settings_tree
from lockstep.trainer.data.prompts import DataSet, Row, heldout_data
from lockstep.trainer.distributed.distributed import Distributed
from lockstep.trainer.engines.named_models import refuse_unfit_models
from lockstep.trainer.engines.start import check_engine, engine_settings
from lockstep.trainer.engines.teacher_prompts import FIELD, SOLUTION
from lockstep.trainer.engines.teacher_start import refuse_unfit_teacher
from lockstep.trainer.model.layers.routing import refuse_dense
from lockstep.trainer.model.memory_plan import GIB, memory_plan
from lockstep.trainer.model.shape import planned_shape
from lockstep.trainer.observe.console import RunConsole
from lockstep.trainer.observe.token_texts import TokenTexts
from lockstep.trainer.observe.trackers.view import lockstep, program
from lockstep.trainer.observe.transcript import conversation
from lockstep.trainer.run.assembly import choose, make_prompts, show_memory_plan, show_scale
from lockstep.trainer.run.library_logs import quiet_third_parties
from lockstep.trainer.settings_file import describe_command
from lockstep.trainer.sft.demonstration_rows import Demonstrations, tokenized

SHOWN_ROWS = 2
MAX_SHOWN_TOKENS = 1500
"""Length above which a row loses its middle."""
MEASURED_ROWS, MEASURED_ROWS_WITH_IMAGES = 20_000, 256
"""Rows of a data set whose prompts are counted in tokens."""
SLOW_REWARDS = {MODEL, *JUDGES}
"""Reward functions that load weights or call another machine."""
PLACEHOLDER = "(the model's answer)"


@contextmanager
def _as_config_errors() -> Iterator[None]:
    """Raise `ConfigError` with the message of any error that would end the run."""
    try:
        yield
    except ConfigError:
        raise
    except LockstepError as error:
        raise ConfigError(f"{type(error).__name__}: {error}") from error


@_as_config_errors()
def dry_run(config: Config) -> None:
    """Check and print everything; a collective.

    Raises `ConfigError` with the message of the error that would end the run, and if a row that it shows cannot be
    trained, or the memory plan exceeds the device.
    """
    quiet_third_parties()
    distributed = Distributed.start(dtype=config.model.dtype, max_grad_norm=config.optimizer.max_grad_norm)
    console = Console(highlight=False, quiet=not distributed.is_main)
    with distributed, BackgroundLoop() as loop:
        run_console = RunConsole(enabled=distributed.is_main, total_updates=0)
        run_console.say(describe_command(config))
        refuse_unfit_models(config, run_console.say)
        chat = make_chat(config.model, history=config.environment.history)
        if config.has_rollouts:
            refuse_dense(config.model, config.correction.routing_replay)
            context = config.engine_context
            engine = engine_settings(config.model, config.rollout, config.correction, seed=config.seed, context=context)
            if config.rollout.engine != "server":
                check_engine(engine)
        refuse_unfit_teacher(config.teacher, config.model, config.rollout)
        config = choose(config, distributed, run_console)
        prompts = make_prompts(config, distributed, loop, chat, say=run_console.say) if config.has_rollouts else None
        heldout = {}
        if config.has_rollouts and config.evaluates:
            heldout = distributed.together(
                lambda: heldout_data(
                    config.heldout_sets(),
                    config.environment,
                    config.reward,
                    **images_of_data(config.model, chat),
                    say=run_console.say,
                )
            )
        demonstrations = Demonstrations.load(config, distributed, chat, say=run_console.say)
        if not config.has_rollouts and config.evaluates:
            sets = config.heldout_sets()
            tokenized(sets, config.demonstrations, config.model, distributed, chat, say=run_console.say)
        batch = demonstrations.draw() if demonstrations else None
        console.print(settings_tree(plain(config)))
        console.print(Rule("[bold]counts[/bold]", style="dim", align="left"))
        counts = run_counts(config, ranks=distributed.world_size, data_rows=len(prompts)) if prompts else {}
        if demonstrations and batch and distributed.is_main:
            counts |= demonstration_counts(
                batch,
                updates=config.updates,
                per_update=config.demonstrations.rows_per_update,
                pack_tokens=config.pack_tokens,
                ranks=distributed.world_size,
                available=demonstrations.count,
            )
        table = Table.grid(padding=(0, 2))
        for name, count in counts.items():
            table.add_row(Text(name, style="dim"), Text(count))
        console.print(table)
        console.print(Rule("[bold]memory[/bold], an estimate for rank 0", style="dim", align="left"))
        shape = planned_shape(
            config.model, config.algorithm, has_critic=config.plan.has_critic, engine_context=config.rotary_context
        )
        available = distributed.device_memory
        plan = memory_plan(shape, config, distributed.sharding)
        too_large = show_memory_plan(plan, run_console, available=available)
        show_scale(shape, config, run_console)
        memory = f"the memory has {available / GIB:.3g} GiB"
        console.print(f"{shape.parameters:,} parameters, {shape.trained:,} trained; {memory}")
        texts = TokenTexts(chat.tokenizer)
        rollouts: list[Rollout] = []
        if prompts:
            console.print(Rule("[bold]the first rows of the data[/bold]", style="dim", align="left"))
            first = [*prompts.take(min(SHOWN_ROWS, len(prompts))), *(data[0] for data in heldout.values())]
            rollouts, notes = loop.run(preview(config, chat, first))
            for note in notes:
                console.print(note, style="italic", markup=False)
            for rollout in rollouts:
                console.print()
                console.print(conversation(rollout, wrapped=True))
                _print_rows(console, rows_from_calls(rollout.calls), texts)
        limit = config.rollout.max_model_len
        sets = [*prompts.sets, *heldout.values()] if prompts and distributed.is_main else []
        long = [sentence for data in sets for sentence in long_prompts(data, config.environment, chat, context=limit)]
        if batch:
            console.print(Rule("[bold]the first demonstrations[/bold]", style="dim", align="left"))
            _print_rows(console, batch.rows[:SHOWN_ROWS], texts)
    words = [word for word in typed_words() if not word.startswith("dry_run=")]
    is_typed = words != typed_words()  # else a settings file says it
    overrides = shlex.join(redact_words(words if is_typed else [*words, "dry_run=false"]))
    launcher = lockstep() if distributed.world_size == 1 else f"{program('accelerate')} launch ... -m lockstep"
    console.print(Rule(style="dim"))
    for warning in (*long, *unrewarded_answers(rollouts), *unknown_names(config.teacher.context or "", rollouts)):
        run_console.warn(warning)
    problems = [] if too_large is None else [f"the run does not fit into memory: {too_large}"]
    if problems := [*problems, *untrainable(config.reward.functions, rollouts)]:
        raise ConfigError("\n".join(problems))
    console.print(f"All checks passed. To start the run, {'leave dry_run out' if is_typed else 'type'}:", style="bold")
    console.print(f"{launcher} train {overrides}", markup=False, soft_wrap=True)


def run_counts(config: Config, *, ranks: int, data_rows: int) -> dict[str, str]:
    """Return the rollouts, tokens, updates and packs of a run, in words, by what they count."""
    rollout, algorithm = config.rollout, config.algorithm
    batch = rollout.prompts_per_step * rollout.samples_per_prompt
    tokens = batch * min(config.max_turns * rollout.max_tokens_per_turn, rollout.max_model_len)
    extra = algorithm.max_refills * batch if algorithm.dynamic_sampling else 0
    extra += rollout.prompts_per_step if config.plan.needs_greedy else 0
    updates_per_step = algorithm.epochs * algorithm.minibatches
    steps = math.ceil(config.updates / updates_per_step)
    prompts = rollout.prompts_per_step * steps
    rows_per_pack = max(1, config.pack_tokens // rollout.max_model_len)
    packs = math.ceil(math.ceil(batch / algorithm.minibatches / ranks) / rows_per_pack)
    return {
        "a step samples": f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = {batch:,} "
        f"rollouts, at most {tokens:,} sampled tokens"
        + (f"; up to {extra:,} more rollouts (refills or greedy answers)" if extra else ""),
        "a step trains": f"{updates_per_step} optimizer updates on {batch // algorithm.minibatches:,} rollouts each",
        "an update runs": f"at most {packs} packs of {config.pack_tokens:,} tokens on each of {ranks} rank(s), if all "
        f"rows are as long as the context of {rollout.max_model_len:,}",
        "the run makes": f"{config.updates:,} updates in {steps:,} steps, {steps * batch:,} rollouts",
        "the run reads": f"{prompts:,} prompts, {prompts / data_rows:.2f} times the {data_rows:,} rows of the data",
    }


def demonstration_counts(
    first: StepBatch, *, updates: int, per_update: int, pack_tokens: int, ranks: int, available: int
) -> dict[str, str]:
    """Return the demonstrations, tokens and packs of a run, in words, by what they count.

    first: the rows of the first update. per_update: demonstrations of an update. available: those in the data.
    """
    longest = max(map(len, first.rows))
    packs = math.ceil(math.ceil(len(first.rows) / ranks) / max(1, pack_tokens // longest))
    read = per_update * updates
    return {
        "the first update trains": f"{per_update:,} demonstrations in {len(first.rows):,} rows of at most {longest:,} "
        f"tokens, {sum(map(len, first.rows)):,} tokens, {first.layout.num_tokens:,} of them trained, in at most "
        f"{packs} packs of {pack_tokens:,} tokens on each of {ranks} rank(s)",
        "the run trains": f"{read:,} demonstrations in {updates:,} updates, {read / available:.2f} times the "
        f"{available:,} of the data",
    }


async def sampled_answer(
    ids: Sequence[int], prompt_ids: Sequence[int], sampling: Sampling, images: Sequence[ImageSpan] = ()
) -> EngineCall:
    """Return `ids` and a stop token as a sampled turn, cut at `sampling.max_tokens`. Its logprobs are zeros."""
    stops = sampling.stop_token_ids[:1]
    whole = (*ids, *stops)
    sampled_ids = whole[: sampling.max_tokens]
    return EngineCall(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=sampled_ids,
        sampled_logprobs=(0.0,) * len(sampled_ids),
        images=tuple(images),
        finish_reason=FinishReason.STOP if stops and sampled_ids == whole else FinishReason.LENGTH,
    )


def answer_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text of the assistant's turns, and where it comes from."""
    for column in ANSWER_COLUMNS:
        value = row.get(column)
        if isinstance(value, str | int | float) and str(value):
            return str(value), f"the row's column {column!r}"
    return PLACEHOLDER, "a placeholder, because the row has no column with an answer"


async def preview(config: Config, chat: Chat, rows: Sequence[Row]) -> tuple[list[Rollout], list[str]]:
    """Run the episodes of rows on their answers and score them. Returns the rollouts, and notes for the user.

    Raises `DataError` if the environment cannot use a row.
    """
    rollouts: list[Rollout] = []
    notes = ["Nothing is sampled. Prompt, template, environment, tools, mask and rewards are those of the run."]
    for number, row in enumerate(rows):
        environment = environment_of(make_environment(config.environment.name, **config.environment.settings), row)
        if isinstance(environment, RunsItself) or declaration_of(environment).driver is not turn_by_turn:
            notes.append(f"Rollout {number} is left out, because its environment is not played turn by turn.")
            continue
        text, source = answer_of(row)
        notes.append(f"Rollout {number}: each turn of the assistant is {source}.")
        ids = chat.tokenizer.encode(text, add_special_tokens=False)
        engine: Any = SimpleNamespace(generate=partial(sampled_answer, ids), max_model_len=config.rollout.max_model_len)
        rollouts.append(
            await run_episode(
                engine=engine,
                chat=chat,
                environment=environment,
                example=row,
                sampling=make_sampling(config.rollout, chat, with_routes=config.plan.replays_engine),
                max_turns=config.max_turns,
                rollout_id=number,
                group_id=number,
                seed=0,
            )
        )
    if slow := sorted(SLOW_REWARDS.intersection(config.reward.functions)):
        notes.append(f"Rewards are left out, because {', '.join(slow)} would load weights or call another machine.")
        return rollouts, notes
    if scores_groups_alone(config.reward.functions):
        notes.append(
            f"Rewards are left out, because {', '.join(config.reward.functions)} would compare rollouts of one row."
        )
        return rollouts, notes
    on_error = {outcome: "drop" if action == "raise" else action for outcome, action in config.reward.on_error.items()}
    # Shown first: the verdict names every rollout that failed.
    rewards = make_rewards(replace(config, reward=replace(config.reward, max_error_rate=1.0, on_error=on_error)))
    if rewards.compares_groups:
        notes.append(
            "Each rollout is a group of its own here, so functions that compare a group may give it no reward."
        )
    try:
        return await rewards.score(rollouts), notes
    finally:
        rewards.close()


def long_prompts(data: DataSet, settings: EnvironmentConfig, chat: Chat, *, context: int) -> Iterator[str]:
    """Yield a sentence if prompts fill the context [tokens]. Prompts that no row holds are not counted."""
    whole, lengths = make_environment(settings.name, **settings.settings), []
    limit = MEASURED_ROWS if chat.images is None else MEASURED_ROWS_WITH_IMAGES
    for row in map(data.__getitem__, range(min(len(data), limit))):
        environment = environment_of(whole, row)
        with suppress(TemplateError):  # its sentence is that of the row
            if messages := messages_of_row(environment, row):
                lengths.append(len(chat.prompt(messages, getattr(environment, "tools", ()))))
    if count := sum(length >= context for length in lengths):
        yield (
            f"{data.path}: {count:,} of {len(lengths):,} prompts are too long for rollout.max_model_len={context}, so "
            f"nothing is sampled from them; the longest has {max(lengths):,} tokens: raise it, or leave them out by "
            "data.max_prompt_tokens"
        )


def untrainable(functions: Sequence[str], rollouts: Sequence[Rollout]) -> list[str]:
    """Return a sentence per rollout that the run would drop, with the line of the user's code and of the data."""
    # Alone in its group, a rollout may have no reward of a function that compares.
    allowed_causes = {None, Cause.UNSCORED} if group_wise_rewards(functions) else {None}
    dropped_rollouts = [rollout for rollout in rollouts if rollout.dropped_by not in allowed_causes]
    return [
        f"a row shown above cannot be trained: {at_row(rollout.error or 'nothing was sampled', rollout.example)}"
        for rollout in dropped_rollouts
    ]


def unrewarded_answers(rollouts: Sequence[Rollout]) -> list[str]:
    """Return a sentence per rollout of a row's own answer whose reward is 0 or less."""
    return [
        at_row(
            f"{answer_of(rollout.example)[1]} scores {rollout.reward:g} as the model's answer: check the environment, "
            "the reward and data.columns, or answer in the form that the reward reads",
            rollout.example,
        )
        for rollout in rollouts
        if rollout.rewards and rollout.reward <= 0 and answer_of(rollout.example)[0] != PLACEHOLDER
    ]


def unknown_names(context: str, rollouts: Sequence[Rollout]) -> list[str]:
    """Return a sentence per name of teacher.context that the rollouts lack. An environment may report it later."""
    names = {SOLUTION, *(name for one in rollouts for name in (*one.example, *one.outcome))}
    return [
        f"teacher.context names {{{name}}}, which these rows lack; expected names of {', '.join(sorted(names))}"
        for name in dict.fromkeys(FIELD.findall(context))
        if name not in names
    ]


def _print_rows(console: Console, rows: Sequence[TrainingRow], texts: TokenTexts) -> None:
    marks = ("⟦", "⟧") if console.color_system is None else ("", "")
    for number, row in enumerate(rows):
        head = f"row {number + 1}: {len(row)} tokens, {row.num_trained} of them trained"
        legend = (f"{marks[0]}trained{marks[1]}", "reverse green")
        console.print(Padding(Text.assemble((head, "bold"), "  ", legend, "  ", ("context", "dim")), (0, 2)))
        console.print(Padding(masked_text(row, texts, marks=marks), (0, 4)))


def masked_text(row: TrainingRow, texts: TokenTexts, *, marks: tuple[str, str]) -> Text:
    """Render the tokens of a row: trained ones in color, in alternating shades, and between `marks`.

    Control characters are escaped, so that text of the model or the data cannot act on the terminal.
    """
    output, half = Text(), MAX_SHOWN_TOKENS // 2
    end_of_gap = max(half, len(row) - half)
    positions = [*range(min(half, len(row))), *range(end_of_gap, len(row))]
    for is_trained, span in groupby(positions, key=lambda position: bool(row.loss_mask[position])):
        output.append(marks[0] if is_trained else "")
        for position in span:
            if position == end_of_gap > half:
                output.append(f"\n... {end_of_gap - half} tokens ...\n", style="italic")
            text = texts[int(row.ids[position])]
            style = ("green" if position % 2 else "bold green") if is_trained else "dim"
            output.append(terminal_safe(text), style=style)
            output.append("\n" * text.count("\n"))
        output.append(marks[1] if is_trained else "")
    return output
