"""Console of a run: rows, remaining time, alarms, progress bars, rollouts."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.trainer.observe.console import (
    ALARM_AGAIN_EVERY,
    COLUMNS,
    Pace,
    PeriodicWork,
    RunConsole,
    fitting,
    time_left,
)
from lockstep.trainer.observe.transcript import MAX_SHOWN_CHARS, shortened, tool_calls
from tests.fixtures.paths import ROOT
from tests.unit.rewards.workers.test_pool import rollout

STEP = {column.key: 0.5 for column in COLUMNS if not column.is_optional}


def console(*, width: int | None = None, rewards: Sequence[str] = ()) -> tuple[RunConsole, io.StringIO]:
    """Make a console on a terminal of this width, or in a file."""
    run, stream = RunConsole(enabled=True, total_updates=80, rewards=rewards), io.StringIO()
    run._console = Console(
        file=stream, force_terminal=width is not None, width=width, highlight=False, color_system=None
    )
    return run, stream


def test_without_a_terminal_nothing_moves_also_where_colors_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = RunConsole(enabled=True, total_updates=2)
    run.begin(0)
    run.row({**STEP, "step": 1})
    run.end()
    said = capsys.readouterr().out
    assert "update 1/2" in said
    assert "\x1b" not in said


class TestRows:
    def test_in_a_file_a_step_is_one_line_of_named_numbers(self):
        run, stream = console()
        run.begin(0)
        run.row({**STEP, "step": 1})
        run.row({**STEP, "step": 2})
        run.end()
        first, second = stream.getvalue().splitlines()
        assert first.startswith("update 1/80  reward 0.500  ± 0.50  tokens 0.5")
        assert second.endswith(" left")
        assert "\x1b" not in stream.getvalue()

    def test_a_line_shows_all_stages_that_took_more_than_a_percent_of_the_step(self):
        run, stream = console()
        step = {key: value for key, value in STEP.items() if not key.startswith("time/")} | {"time/step": 100.0}
        run.row({**step, "step": 1, "time/score": 95.0, "time/reward": 0.5, "time/update": 4.0})
        run.row({**step, "step": 2, "time/score": 0.5, "time/reward": 5.0, "time/update": 94.0})
        first, second = stream.getvalue().splitlines()
        assert first.endswith("step s 100.00  score s 95.00  update s 4.00")
        assert "step s 100.00  reward s 5.00  update s 94.00" in second

    @pytest.mark.parametrize("width", [None, 120])
    def test_a_step_names_the_rollouts_that_are_not_trained_by_cause(self, width: int | None):
        run, stream = console(width=width)
        causes = {"reward": 8.0, "environment": 4.0, "engine": 0.0, "fraction": 0.2}
        run.row({**STEP, "step": 1} | {f"rollout/dropped_{cause}": value for cause, value in causes.items()})
        run.row({**STEP, "step": 2} | {f"rollout/dropped_{cause}": 0.0 for cause in causes})
        assert re.findall(r"dropped:? (.*?)(?:  |$)", stream.getvalue(), re.MULTILINE) == ["reward 8, environment 4"]

    @pytest.mark.parametrize("width", [30, 40])
    def test_on_a_narrow_terminal_the_causes_stay_one_line(self, width: int):
        run, stream = console(width=width)
        causes = ("reward", "unscored", "environment", "engine")
        run.row({**STEP, "step": 1} | {f"rollout/dropped_{cause}": 8.0 for cause in causes})
        header, row, drops = stream.getvalue().splitlines()
        assert max(map(len, (header, row, drops))) <= width
        assert drops.startswith("  dropped: reward 8, ")
        assert drops.endswith("…")

    def test_a_line_has_the_mean_of_each_of_several_reward_functions(self):
        means = {"step": 1, "reward/right/mean": 0.25, "reward/brief/mean": 0.75}
        run, stream = console(rewards=("right", "brief", "rare"))
        run.row({**STEP, **means})
        assert "reward 0.500  ± 0.50  right 0.250  brief 0.750  rare -  tokens" in stream.getvalue()
        run, stream = console(rewards=("right",))
        run.row({**STEP, **means})
        assert "reward 0.500  ± 0.50  tokens" in stream.getvalue()

    def test_a_narrow_terminal_drops_the_means_of_reward_functions(self):
        run, stream = console(width=40, rewards=("right", "a_function_of_a_long_name"))
        run.row({**STEP, "step": 1, "reward/right/mean": 0.25})
        assert max(map(len, stream.getvalue().splitlines())) <= 40
        assert "reward" in stream.getvalue()
        assert "right" not in stream.getvalue()

    def test_truncated_rollouts_are_in_the_lines_of_steps_that_have_some(self):
        none = {**STEP, **dict.fromkeys(("rollout/context_full_fraction", "environment/tool_errors"), 0.0)}
        run, stream = console()
        for update, share in ((1, 0.0), (2, 0.25), (3, 0.0)):
            run.row({**none, "step": update, "rollout/truncated_fraction": share})
        first, second, third = stream.getvalue().splitlines()
        assert "turns 0.50  truncated 25.0%  kl" in second
        assert not any("truncated" in line or "context" in line for line in (first, third))

    def test_tool_errors_are_in_the_lines_of_steps_that_have_some(self):
        run, stream = console()
        for update, errors in ((1, 0.0), (2, 0.25)):
            run.row({**STEP, "rollout/context_full_fraction": 0, "step": update, "environment/tool_errors": errors})
        first, second = stream.getvalue().splitlines()
        assert "tool errors 0.25  kl" in second
        assert "tool" not in first

    def test_a_table_has_a_column_of_truncated_rollouts_from_the_first_step_with_some(self):
        run, stream = console(width=200)
        for update, share in ((1, 0.0), (2, 0.25), (3, 0.0)):
            run.row({**STEP, "step": update, "rollout/truncated_fraction": share, "rollout/context_full_fraction": 0})
        header, first, other_header, second, third = stream.getvalue().splitlines()
        assert "truncated" not in header
        end = other_header.index("truncated") + len("truncated")
        assert (second[end - 5 : end], third[end - 4 : end]) == ("25.0%", "0.0%")
        assert len(first) == len(header)
        assert len(third) == len(second) == len(other_header)

    def test_every_timed_stage_has_a_column(self):
        sources = [*(ROOT / "trainer" / "collect").glob("*.py"), ROOT / "trainer" / "step.py"]
        timed = {name for path in sources for name in re.findall(r'(?:with |\.)stage\("(\w+)"\)', path.read_text())}
        assert timed == {column.key.removeprefix("time/") for column in COLUMNS if column.is_stage}

    @pytest.mark.parametrize("width", [40, 80, 120, 200])
    def test_on_a_terminal_a_row_fits_its_width(self, width: int):
        run, stream = console(width=width)
        for update in range(1, 23):
            run.row({**STEP, "step": update})
        lines = stream.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert [i for i, line in enumerate(lines) if "reward" in line] == [0, 21], "the header repeats"

    def test_narrow_terminals_keep_the_columns_of_lowest_rank(self):
        columns = [column for column in COLUMNS if not column.is_optional]
        assert [column.name for column in fitting(columns, 30)] == ["reward", "tokens", "kl", "step s"]
        assert fitting(COLUMNS, 1000) == list(COLUMNS)

    def test_columns_of_a_critic_appear_only_in_runs_with_one(self):
        run, stream = console(width=200)
        run.row({**STEP, "step": 1, "value/explained_variance": 0.25})
        assert "value ev" in stream.getvalue()
        assert "ref kl" not in stream.getvalue()


class TestPace:
    def test_the_pace_is_that_of_the_median_update(self):
        now = [0.0]
        pace = Pace(lambda: now[0])
        assert pace.seconds_per_update is None
        for update, seconds in enumerate([0, 10, 10, 100, 10, 10]):  # one with a checkpoint
            now[0] += seconds
            pace.reached(update)
        assert pace.seconds_per_update == 10

    def test_the_first_step_does_not_predict_the_others(self):
        now = [0.0]
        pace = Pace(lambda: now[0])
        for update, seconds, expected in ((0, 0, None), (1, 100, None), (2, 10, 10), (3, 12, 11)):
            now[0] += seconds
            pace.reached(update)
            assert pace.seconds_per_update == expected

    def test_steps_may_have_several_updates_or_none(self):
        now = [0.0]
        pace = Pace(lambda: now[0])
        for update, at in ((4, 0), (8, 400), (8, 410), (12, 450)):
            now[0] = at
            pace.reached(update)
        assert pace.seconds_per_update == 10

    def test_other_work_does_not_slow_the_pace(self):
        now = [0.0]
        pace = Pace(lambda: now[0])
        pace.leave_out(7)  # an evaluation before the first update
        for update, seconds, others in ((0, 7, 0), (1, 50, 30), (2, 40, 30), (3, 10, 0)):
            pace.leave_out(others)
            now[0] += seconds
            pace.reached(update)
        assert list(pace._per_update) == [10, 10]


def work(every: int, seconds: float | None, *, is_at_end: bool = True, is_after_line: bool = False) -> PeriodicWork:
    """Make a work that has taken so long so far; None: it has not been measured."""
    made = PeriodicWork(every=every, is_at_end=is_at_end, is_after_line=is_after_line)
    made.durations.extend([] if seconds is None else [seconds])
    return made


class TestTimeLeft:
    @pytest.mark.parametrize(
        ("update", "works", "expected"),
        [
            (20, [], "0:10:00"),
            (20, [work(0, 100)], "0:11:40"),  # at the end only
            (20, [work(10, 100)], "0:20:00"),  # the evaluation of update 20 is done
            (20, [work(10, 100, is_after_line=True)], "0:21:40"),  # its checkpoint is not
            (21, [work(10, 100, is_after_line=True)], "0:19:50"),
            (20, [work(30, 100)], "0:15:00"),  # 30, 60 and the end
            (20, [work(30, 100, is_at_end=False)], "0:13:20"),  # 30, 60
            (20, [work(30, 100), work(0, 1)], "0:15:01"),
            (80, [work(10, 100, is_after_line=True)], "0:01:40"),
        ],
    )
    def test_it_includes_what_is_still_due(self, update: int, works: list[PeriodicWork], expected: str):
        assert time_left(update, 80, 10, works) == f"{expected} left"

    def test_it_is_at_least_the_updates_until_everything_else_was_measured(self):
        assert time_left(20, 80, 10, [work(10, None), work(0, 100)]) == "over 0:11:40 left"
        assert time_left(75, 80, 10, [work(30, None, is_at_end=False)]) == "0:00:50 left", "not due any more"

    def test_without_a_measured_update_nothing_is_promised(self):
        assert time_left(1, 80, None, [work(10, 100)]) == ""

    def test_after_the_last_update_only_what_takes_time_is_left(self):
        assert time_left(80, 80, 10, [work(10, 100), work(0, None, is_after_line=True)]) == ""
        assert time_left(80, 80, 10, [work(0, 0.2, is_after_line=True)]) == ""

    def test_works_follow_steps_which_may_have_several_updates(self):
        assert time_left(40, 80, 10, [work(1, 100)], stride=4) == "0:23:20 left", "ten more steps"

    @pytest.mark.parametrize("resumed_at", [0, 37])
    def test_a_run_never_promises_less_than_what_comes(self, resumed_at: int):
        """Slow first steps, an evaluation every 10 updates and a checkpoint every 7."""
        now, promises, ends = [0.0], {}, 83
        pace = Pace(lambda: now[0])
        evaluation, checkpoint = work(10, None), work(7, None, is_after_line=True)
        pace.reached(resumed_at)

        def do(one: PeriodicWork, seconds: float) -> None:
            now[0] += seconds
            one.durations.append(seconds)
            pace.leave_out(seconds)

        for update in range(resumed_at + 1, ends + 1):
            now[0] += max(10, 100 - 30 * (update - resumed_at))
            if update % 10 == 0 or update == ends:
                do(evaluation, 90)
            pace.reached(update)
            left = time_left(update, ends, pace.seconds_per_update, [evaluation, checkpoint], stride=pace.stride)
            promises[now[0]] = left
            if update % 7 == 0 or update == ends:
                do(checkpoint, 5)
        whole = {at: left for at, left in promises.items() if left and "over" not in left}
        assert len(whole) > 30
        for at, left in whole.items():
            hours, minutes, seconds = map(int, left.split()[0].split(":"))
            promised = 3600 * hours + 60 * minutes + seconds
            assert promised >= now[0] - at
            assert promised <= 1.3 * (now[0] - at) or at < 700, "slow first steps are forgotten"


class TestAlarms:
    def test_an_alarm_is_printed_when_it_begins_while_it_lasts_and_when_it_is_over(self):
        run, stream = console()
        for _ in range(ALARM_AGAIN_EVERY + 2):
            run.alarms(["|kl| is 0.2, above 0.1: sampler and trainer disagree."])
        run.alarms([])
        run.alarms([])
        lines = stream.getvalue().splitlines()
        assert lines == [
            "alarm |kl| is 0.2, above 0.1: sampler and trainer disagree.",
            f"alarm |kl| is 0.2, above 0.1: sampler and trainer disagree. (for {ALARM_AGAIN_EVERY + 1} steps)",
            "over  |kl| is back to normal",
        ]

    def test_what_is_well_is_a_note_and_no_alarm(self):
        run, stream = console()
        run.alarms([], ["reward/mean is 1 for every rollout of this step."])
        assert stream.getvalue() == "note reward/mean is 1 for every rollout of this step.\n"


class TestLines:
    def test_text_from_outside_cannot_control_the_terminal_or_be_markup(self):
        run, stream = console(width=200)
        for printed in (run.say, run.warn, lambda text: run.alarms([text]), lambda _: run.alarms([])):
            printed("a/[/b]x[red] \x1b[2J\ud800\\")
        assert "\x1b" not in stream.getvalue()
        assert stream.getvalue().count("a/[/b]x[red] \\x1b[2J\\ud800\\") == 4


class TestProgress:
    def test_bars_count_rollouts_and_disappear(self):
        run, stream = console(width=100)
        run.begin(3)
        with run.rollouts(2) as arrived:
            arrived(rollout("a"))
            arrived(rollout("b"))
            arrived(rollout("c"))  # from a refill
            progress = run._progress
            assert progress is not None
            task = progress.tasks[run._tasks["rollouts"]]
            assert (task.completed, task.total) == (3, 3)
            assert "training on them" in task.fields["note"]
        run.row({**STEP, "step": 4})
        assert progress.tasks[run._tasks["updates"]].completed == 4
        run.end()
        run.end()
        assert "\x1b[?25h" in stream.getvalue(), "the cursor is visible again"

    def test_in_a_file_there_are_no_bars(self):
        run, stream = console()
        run.begin(0)
        with run.rollouts(2) as arrived:
            arrived(rollout("a"))
        run.end()
        assert stream.getvalue() == ""


class TestRollouts:
    def test_tool_calls_are_shown_as_code(self):
        calls = [
            {"function": {"name": "add", "arguments": {"a": 1, "b": "x"}}},
            {"function": {"name": "add", "arguments": '{"a": 1}'}},
            {"function": {"name": "add", "arguments": "{broken"}},
        ]
        assert list(tool_calls({"tool_calls": calls})) == ['add(a=1, b="x")', "add(a=1)", "add({broken)"]

    @pytest.mark.parametrize("width", [None, 60])
    def test_model_text_cannot_control_the_terminal(self, width: int | None):
        run, stream = console(width=width)
        run.sample(rollout("\x1b]0;owned\x07 [red]a[/red] \x1b[2J"))
        assert not set("\x1b\x07") & set(stream.getvalue())
        assert "[red]a[/red]" in stream.getvalue()

    def test_a_role_cannot_control_the_terminal(self):
        run, stream = console()
        run.sample(replace(rollout("a"), messages=({"role": "\x1b[2J[/b]", "content": "x"},)))
        assert "\x1b" not in stream.getvalue()

    def test_worked_examples_of_the_prompt_are_one_line(self):
        run, stream = console()
        turns = [("system", "s"), ("user", "q1"), ("assistant", "e1"), ("user", "q2"), ("assistant", "sampled")]
        messages = tuple({"role": role, "content": text} for role, text in turns)
        run.sample(replace(rollout("a"), messages=messages))
        said = [" ".join(line.split()) for line in stream.getvalue().splitlines()[1:]]
        assert said == ["prompt [2 messages of worked examples]", "user q2", "assistant sampled"]

    def test_long_messages_lose_their_middle(self):
        text = "a" * 5000 + "b" * 5000
        assert len(shortened(text)) < MAX_SHOWN_CHARS + 50
        assert "8,800 characters" in shortened(text)


def test_model_text_cannot_style_the_console():
    console = RunConsole(enabled=True, total_updates=1)
    stream = io.StringIO()
    console._console = Console(file=stream, force_terminal=True, soft_wrap=True, highlight=False)
    console.sample(rollout("[bold red]alarm[/bold red] [link=http://x]y[/link] [/] \\[x"))
    console.warn("[red]a[/red]")
    console.say("[link=http://x]y[/link]")
    shown = stream.getvalue()
    assert "[bold red]alarm[/bold red] [link=http://x]y[/link] [/]" in shown
    assert "[red]a[/red]" in shown
    assert "\x1b]8;" not in shown  # no link
