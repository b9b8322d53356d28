import json

import pytest

from lockstep.lab.plot import curves_of, plot_runs
from lockstep.rollout.errors import ConfigError


def lines(*rewards, kl=0.001):
    return [
        {"step": step, "reward/mean": reward, "rollout_correction/kl": kl, "rollout_correction/logp_diff_abs_max": kl}
        for step, reward in enumerate(rewards, start=1)
    ]


@pytest.mark.parametrize("rewards", [(0.0, 0.4, 1.0), (0.3, 1.2, 1.94), (-0.5, -0.18), (-40.0, 3.0), (5.0,)])
@pytest.mark.parametrize("num_runs", [1, 3])
def test_every_reward_lies_inside_of_the_axis(rewards, num_runs):
    figure = curves_of([(f"run {number}", lines(*rewards)) for number in range(num_runs)], None)
    low, high = figure.axes[0].get_ylim()
    assert low <= min(rewards) <= max(rewards) <= high
    assert high - low <= 1.2 * max(max(rewards) - min(rewards), 1)


def test_rewards_between_0_and_1_have_the_same_axis_in_every_picture():
    assert curves_of([("a", lines(0.2, 0.3))], None).axes[0].get_ylim() == (0, 1.02)


def test_a_large_mismatch_lies_inside_of_the_axis():
    low, high = curves_of([("a", lines(0.2, 0.3, kl=7.0))], None).axes[1].get_ylim()
    assert low < 0.01 < 7.0 < high


@pytest.mark.parametrize("metrics", [None, ["reward/mean", "rollout_correction/kl"]])
@pytest.mark.parametrize("num_updates", [1, 3, 10])
def test_ticks_are_updates(metrics, num_updates):
    figure = curves_of([("a", lines(*(0.1 * i for i in range(num_updates))))], metrics)
    for panel in figure.axes:
        ticks = panel.xaxis.get_majorticklocs()
        assert any(1 <= tick <= num_updates for tick in ticks)
        assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize("num_runs", [1, 3])
def test_names_lie_beside_the_lines(num_runs):
    figure = curves_of([(f"run {number}", lines(0.2, 0.3)) for number in range(num_runs)], None)
    figure.canvas.draw()
    legends = [*figure.legends, *(panel.get_legend() for panel in figure.axes if panel.get_legend())]
    assert sum(len(legend.get_texts()) for legend in legends) == 2 + (num_runs if num_runs > 1 else 0)
    for legend in legends:
        assert not any(legend.get_window_extent().overlaps(panel.get_window_extent()) for panel in figure.axes)


def test_one_update_is_a_point():
    panel, *_ = curves_of([("a", lines(0.5))], ["reward/mean"]).axes
    assert panel.lines[0].get_marker() == "o"


def test_a_metric_that_no_run_has_is_an_error_with_near_names(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(0.5, 0.6)))
    with pytest.raises(ConfigError, match="no run has a value of the metric reward/maen; near: reward/mean"):
        plot_runs([tmp_path], ["reward/mean", "reward/maen"], None)
    with pytest.raises(ConfigError, match=r"quark; metrics.jsonl lists all"):
        plot_runs([tmp_path], ["quark"], None)
    assert not (tmp_path / "metrics.png").exists()
    assert plot_runs([tmp_path], ["reward/mean"], None).read_bytes().startswith(b"\x89PNG")
