"""Text on the report and the token view can be read in light and in dark: WCAG 2.1's contrast of 4.5."""

from __future__ import annotations

import re

import pytest

from tests.fixtures.paths import ROOT

STYLE = (ROOT / "trainer/observe/pages/base.css.jinja").read_text()
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in STYLE.split("(prefers-color-scheme: dark)")
)
ON_CARDS = ("text", "soft", "masked", "accent", "ok", "warning", "critical")


def luminance(colour: str) -> float:
    """Relative luminance of sRGB, 0 to 1 (WCAG 2.1)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, LIGHT | DARK], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(colours: dict[str, str]):
    pairs = [(name, "card") for name in ON_CARDS] + [(name, f"{name}-back") for name in ("ok", "warning", "critical")]
    pairs += [("text", "page"), ("soft", "page")]
    faint = [f"{text} on {back}" for text, back in pairs if contrast(colours[text], colours[back]) < 4.5]
    assert not faint


def test_the_scale_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
