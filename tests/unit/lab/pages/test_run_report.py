"""Report of a run: content, safety, layout on phone and desktop."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from omegaconf import OmegaConf

from lockstep.lab.pages.chart import HEIGHT, MAX_POINTS, WIDTH, Chart, Curve, number
from lockstep.lab.pages.run_report import charts, report, stages, tiles, write_report
from lockstep.lab.pages.saved_run import SavedRun
from lockstep.lab.pages.token_view import TEMPLATE as TOKEN_VIEW
from lockstep.rollout.errors import ConfigError, DataError
from lockstep.rollout.records import EngineCall, FinishReason, Rollout, RolloutStatus
from lockstep.rollout.saved_rollouts import write_rollouts
from lockstep.trainer.config.schema import Config
from lockstep.trainer.config.tree import plain
from tests.fixtures.browser import WIDTHS, dom, needs_chromium
from tests.fixtures.forked_python import forked_python
from tests.fixtures.paths import ROOT

HOSTILE = "</p><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;"
LONG = "x" * 400


def rollout(number: int, reward: float, said: str = "The answer is 3", **more) -> Rollout:
    call = EngineCall(
        prompt_ids=(1,), sampled_ids=(2, 3), sampled_logprobs=(-0.5, -0.1), finish_reason=FinishReason.STOP
    )
    tool_call = {"function": {"name": "calculator", "arguments": {"expression": said}}}
    messages = (
        {"role": "user", "content": "compute 1+2"},
        {"role": "assistant", "content": "", "tool_calls": [tool_call]},
        {"role": "tool", "content": said},
        {"role": "assistant", "content": said},
    )
    return Rollout(
        rollout_id=number, group_id=number // 2, calls=(call, call), messages=messages, reward=reward,
        rewards={"demo_answer": reward}, **more,
    )  # fmt: skip


def line(update: int, **more: float | None) -> dict[str, float | None]:
    return {
        "step": update, "reward/mean": update / 20, "reward/std": 0.3, "rollout/sampled_tokens_mean": 20.0,
        "rollout/sampled_tokens": 1000.0, "rollout/token_match_rate": 1.0, "rollout/completed_fraction": 1.0,
        "rollout/failed_fraction": 0.0, "rollout_correction/kl": 1e-7, "rollout_correction/k3_kl": 1e-12,
        "rollout_correction/noise_floor_kl": 0.0, "rollout_correction/noise_floor_k3": 1e-13,
        "rollout_correction/ess": 1.0, "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5,
        **more,
    }  # fmt: skip


def write_run(directory: Path, lines: list[dict], rollouts: list[Rollout], config: Config | None = None) -> Path:
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain(config or Config()))))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    if rollouts:
        write_rollouts(directory / "rollouts" / f"step-{len(lines):06d}.jsonl", rollouts)
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [line(update) for update in range(1, 11)]
    lines[3]["rollout_correction/kl"] = lines[4]["rollout_correction/kl"] = 0.25
    lines[9]["rollout/token_match_rate"] = 0.5
    return write_run(
        tmp_path / "run", lines, [rollout(i, float(i % 2)) for i in range(8)], Config(updates=10, token_budget=999)
    )


class TestContent:
    def test_numbers_curves_and_settings_are_those_of_the_run(self, run: Path):
        page = html.unescape(report(SavedRun.read(run)))
        for words in (
            "10 of 10",
            "reward, mean of first 5 → last 5",
            "0.15 → 0.4",
            "0:00:20",
            "update 10: mean 0.5",
            "token_budget",
            "<td>999</td>",
            "compute 1+2",
        ):
            assert words in page, words
        assert 'calculator(expression="The answer is 3")' in page

    def test_held_out_reward_has_its_value_before_training_beside_it(self, tmp_path: Path):
        lines = [{"step": 0, "eval/reward_mean": 0.484}, line(1), line(2, **{"eval/reward_mean": 0.781})]
        found = dict(tiles(SavedRun.read(write_run(tmp_path / "run", lines, []))))
        assert found["held out, before → last"] == "0.484 → 0.781"
        assert found["reward, first → last"] == "0.05 → 0.1"
        found = dict(tiles(SavedRun.read(write_run(tmp_path / "other", lines[1:], []))))
        assert found["held out, last"] == "0.781", "not measured before training"

    def test_alarms_are_listed_with_their_updates(self, run: Path):
        kl, match = SavedRun.read(run).alarms()
        assert (kl.first, kl.last) == (4, 5)
        assert "|rollout_correction/kl| is 0.25, above 0.1" in kl.sentence
        assert (match.first, match.last) == (10, 10)
        page = report(SavedRun.read(run))
        assert "updates 4 to 5" in page
        assert "1 alarm<" in page  # the badge counts the alarms of the last step

    def test_rollouts_that_are_not_trained_are_shown_by_cause(self, run: Path, tmp_path: Path):
        lines = [
            line(update, **{"rollout/dropped_reward": 3.0 * (update == 2), "rollout/dropped_engine": 0.0})
            for update in (1, 2)
        ]
        lines[1]["rollout/dropped_fraction"] = 0.5
        lost = SavedRun.read(write_run(tmp_path / "lost", lines, []))
        (chart,) = [chart for chart in charts(lost)["Rollouts"] if chart.title == "Rollouts that are not trained"]
        assert [(curve.name, curve.points) for curve in chart.curves] == [("reward", [(1, 0.0), (2, 3.0)])]
        page = report(lost)
        assert "Rollouts that are not trained" in page
        assert "rollout/dropped_fraction is 0.5" in page
        assert "Rollouts that are not trained" not in report(SavedRun.read(run))

    def test_the_load_of_experts_is_shown_for_models_that_have_them(self, run: Path, tmp_path: Path):
        load = {"router/load_max": 2.0, "router/load_cv": 0.5, "router/unused_experts": 3.0}
        lines = [line(update, **load) for update in (1, 2)]
        page = report(SavedRun.read(write_run(tmp_path / "experts", lines, [])))
        dense = report(SavedRun.read(run))
        for title in ("Load of experts", "Unused experts"):
            assert title in page
            assert title not in dense

    def test_the_difficulty_of_the_data_is_shown_with_a_curriculum(self, run: Path, tmp_path: Path):
        shares = {"unseen": 0.5, "too_hard": 0.25, "between": 0.125, "solved": 0.125}
        lines = [line(update, **{f"data/{name}_share": value for name, value in shares.items()}) for update in (1, 2)]
        page = report(SavedRun.read(write_run(tmp_path / "curriculum", lines, [])))
        (chart,) = [
            chart for chart in charts(SavedRun.read(tmp_path / "curriculum"))["Learning"] if "Difficulty" in chart.title
        ]
        assert [curve.points[-1][1] for curve in chart.curves] == list(shares.values())
        assert "Difficulty of the data" in page
        assert "Difficulty of the data" not in report(SavedRun.read(run))

    def test_a_non_finite_number_is_an_alarm(self, tmp_path: Path):
        run = write_run(tmp_path / "run", [line(1), line(2, **{"rollout_correction/kl": None})], [])
        (alarm,) = SavedRun.read(run).alarms()
        assert "not finite" in alarm.sentence

    def test_stages_add_up_to_the_total_time(self, run: Path):
        found = stages(SavedRun.read(run))
        assert found == {"rollout": 10.0, "update": 5.0, "other": 5.0}

    def test_failed_rollouts_are_the_worst_and_prompts_vary(self, tmp_path: Path):
        rollouts = [rollout(i, 1.0 if i >= 5 else 0.0) for i in range(10)]
        rollouts[4] = rollout(4, 0.0, status=RolloutStatus.FAILED, error="boom")
        run = SavedRun.read(write_run(tmp_path / "run", [line(1)], rollouts))
        worst, best = run.extremes(3)
        assert [r.rollout_id for r in worst] == [4, 0, 2]
        assert [r.rollout_id for r in best] == [9, 7, 5]

    def test_worked_examples_of_the_prompt_are_folded(self, tmp_path: Path):
        examples = ({"role": "user", "content": "compute 5+5"}, {"role": "assistant", "content": "an example"})
        plain, shown = (rollout(n, 1.0) for n in range(2))
        shown = replace(shown, messages=(*examples, *shown.messages))
        page = report(SavedRun.read(write_run(tmp_path / "run", [line(1)], [plain, shown])))
        assert page.count("2 messages of worked examples in the prompt") == page.count("an example")
        assert page.index("worked examples") < page.index("an example")

    def test_an_active_run_has_a_report(self, run: Path):
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 11, "rew')
        assert len(SavedRun.read(run).lines) == 10

    def test_a_run_without_rollouts_and_with_one_step_has_a_report(self, tmp_path: Path):
        page = report(SavedRun.read(write_run(tmp_path / "run", [line(1)], [])))
        assert "Rollouts of update" not in page

    def test_settings_of_another_version_are_shown(self, run: Path):
        config = (run / "config.yaml").read_text().replace("token_budget: 999\n", "old_setting: 3\n")
        (run / "config.yaml").write_text(config)
        assert "old_setting" in report(SavedRun.read(run))

    def test_a_directory_without_a_run_is_refused(self, tmp_path: Path, run: Path):
        with pytest.raises(ConfigError, match="for example runs/latest"):
            SavedRun.read(tmp_path)
        (run / "metrics.jsonl").write_text("garbage\n{}\n")
        with pytest.raises(DataError, match=r"metrics\.jsonl:1"):
            SavedRun.read(run)

    def test_the_command_writes_the_page_into_the_run(self, run: Path):
        command = [forked_python(), "scripts/report.py", str(run)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        assert done.stdout.strip() == str(run / "report.html")
        assert (run / "report.html").read_text() == report(SavedRun.read(run))

    def test_the_command_writes_a_page_for_each_run_and_says_what_compares_them(self, run: Path, tmp_path: Path):
        other = write_run(tmp_path / "other run", [line(1)], [])
        command = [forked_python(), "scripts/report.py", str(run), str(other)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        first, second, hint = done.stdout.splitlines()
        assert [first, second] == [f"{one}/report.html" for one in (run, other)]
        assert hint.endswith(f"lockstep plot {run} '{other}', or lockstep watch {run} '{other}'")
        command += ["--out", str(tmp_path / "page.html")]
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert refused.returncode == 2
        assert "--out names one file for 2 runs" in refused.stderr
        assert not (tmp_path / "page.html").exists()


class TestSafety:
    def test_the_page_loads_and_runs_nothing(self, run: Path):
        page = report(SavedRun.read(run))
        assert not re.search(r"""(?:src|href)\s*=|url\(|https?://|@import|<script""", page)
        assert "default-src 'none'; style-src 'unsafe-inline'\"" in page

    def test_text_of_models_data_and_settings_is_escaped(self, tmp_path: Path):
        rollouts = [rollout(i, 0.0, said=HOSTILE, error=HOSTILE, status=RolloutStatus.FAILED) for i in range(2)]
        config = Config(run_name=HOSTILE)
        config.environment.settings = {"system_prompt": HOSTILE}
        page = report(SavedRun.read(write_run(tmp_path / "run", [line(1)], rollouts, config)))
        assert "<script" not in page
        assert "<img" not in page
        assert page.count("&lt;script&gt;document.title") >= 6

    def test_text_that_no_encoding_has_is_replaced(self, tmp_path: Path):
        rollouts = [rollout(i, 0.0, said="a \ud800", error="b \udfff", status=RolloutStatus.FAILED) for i in range(2)]
        run = write_run(tmp_path / "run", [line(1)], rollouts)
        write_report(SavedRun.read(run), run / "report.html")
        page = (run / "report.html").read_text(encoding="utf-8")
        assert "a ?" in page
        assert "b \\udfff" in page

    def test_a_report_that_cannot_be_written_leaves_the_older_one(self, run: Path, monkeypatch: pytest.MonkeyPatch):
        page = run / "report.html"
        write_report(SavedRun.read(run), page)
        before = page.read_text()

        def full_disk(*_: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr("os.fsync", full_disk)
        with pytest.raises(OSError, match="no space"):
            write_report(SavedRun.read(run), page)
        assert page.read_text() == before
        assert not list(run.glob("*.partial"))

    def test_a_report_can_go_to_a_pipe_or_through_a_link(self, run: Path, tmp_path: Path):
        read, write = os.pipe()
        with open(read, encoding="utf-8") as reader, ThreadPoolExecutor() as thread:
            found = thread.submit(reader.read)
            write_report(SavedRun.read(run), Path(f"/dev/fd/{write}"))
            os.close(write)
            assert found.result().startswith("<!DOCTYPE html>")
        (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
        write_report(SavedRun.read(run), tmp_path / "link.html")
        assert (tmp_path / "link.html").is_symlink()
        assert (tmp_path / "page.html").is_file()


class TestChart:
    def places(self, chart: Chart) -> list[tuple[float, float]]:
        svg = ElementTree.fromstring(str(chart.svg()))
        circles = [element for element in svg.iter() if element.tag == "circle"]
        return [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in circles]

    @pytest.mark.parametrize(
        "values", [[0.0], [1.0, 1.0], [0.0, 0.0], [-3.0, 5.0], [1e-12, 1e9], [123456.0, 123457.0], list(range(1000))]
    )
    @pytest.mark.parametrize("is_log", [False, True])
    def test_every_point_lies_inside(self, values: list[float], is_log: bool):
        chart = Chart(title="t", curves=[Curve(name="c", points=list(enumerate(values)))], is_log=is_log)
        places = self.places(chart)
        assert len(places) == min(len(values), MAX_POINTS)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)

    def test_larger_values_are_higher_and_later_ones_further_right(self):
        (x0, y0), (x1, y1) = self.places(Chart(title="t", curves=[Curve(name="c", points=[(1, 0.2), (2, 0.9)])]))
        assert x0 < x1
        assert y0 > y1

    def test_long_curves_are_thinned_to_means(self):
        points = [(float(i), float(i % 2)) for i in range(10 * MAX_POINTS)]
        svg = str(Chart(title="t", curves=[Curve(name="c", points=points)]).svg())
        assert "c 0.5<" in svg

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (0.5, "0.5"), (1234, "1,234"), (2.8e-8, "2.8e-8"), (-0.25, "-0.25"), (1.5e6, "1.5e6"), (12, "12")],
    )
    def test_numbers_are_short(self, value: float, text: str):
        assert number(value) == text


def themes() -> dict[str, dict[str, str]]:
    """Return the colors of the pages by name, for light and dark."""
    style = (ROOT / "lab" / "pages" / "base.css.jinja").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    found = {}
    for name, part in (("light", light), ("dark", dark[: dark.index("* {")])):
        found[name] = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
    return found


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2.2, section 1.4.3."""

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_curves_have_enough_contrast(theme: str):
    colors = themes()["light"] | themes()[theme]
    pairs = [(name, back) for name in ("text", "soft", "accent", "critical") for back in ("card", "page")]
    pairs += [(name, "card") for name in ("masked", "ok", "warning")]
    pairs += [(name, f"{name}-back") for name in ("ok", "warning", "critical")]
    assert [pair for pair in pairs if contrast(*(colors[name] for name in pair)) < 4.5] == []
    series = [name for name in colors if name.startswith("series-")]
    assert len(series) == 6
    assert all(contrast(colors[name], colors["card"]) >= 3 for name in series)


def test_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_both_pages_share_the_style():
    for template in ("report.html.jinja", TOKEN_VIEW):
        assert '{% include "base.css.jinja" %}' in (ROOT / "lab" / "pages" / template).read_text()


@needs_chromium
@pytest.mark.parametrize("width", [500, 1280])
def test_nothing_overflows_on_phone_or_desktop(tmp_path: Path, width: int):
    """Headless Chromium opens no window narrower than 500; the layout changes at 800."""
    lines = [line(update, **{"rollout_correction/kl": 0.5}) for update in range(1, 40)]
    config = Config(run_name=LONG)
    config.environment.settings = {LONG: LONG}
    rollouts = [rollout(i, float(i % 2), said=f"{LONG}\n{LONG}", error=LONG) for i in range(8)]
    page = report(SavedRun.read(write_run(tmp_path / "run", lines, rollouts, config)))
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)  # it would block the measuring script
    shown = dom(page.replace("</body>", WIDTHS + "</body>"), tmp_path, width=width)
    title = re.search(r"<title>(.*?)</title>", shown)
    assert title is not None
    measured = json.loads(html.unescape(title[1]))
    assert measured["wide"] == []
    assert measured["scroll"] <= measured["width"] <= width
