"""Token view: hostile text stays text, and the page's script runs in a real browser."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.lab.diagnosis.diagnosis import Diagnosis
from lockstep.lab.pages.token_view import color_scale, script_json, token_view, write_token_view
from lockstep.rollout.records import ImageSpan
from lockstep.trainer.observe.token_texts import TokenTexts
from tests.fixtures.browser import dom, needs_chromium
from tests.fixtures.made_up_model import TOKENIZER, FakeTrainer, examine, scored_tokens, two_turns
from tests.fixtures.vision import images_in, picture

ABSENT = "its file is not in the run's folder media"
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&amp;"


class HostileTexts(TokenTexts):
    """A vocabulary of attacks: tokenizer files are untrusted too."""

    def __getitem__(self, token_id: int) -> str:
        return HOSTILE


def with_hostile_texts(diagnosis: Diagnosis) -> Diagnosis:
    texts = HostileTexts(TOKENIZER)
    cases = tuple(replace(case, scored=replace(case.scored, texts=texts)) for case in diagnosis.cases)
    return replace(diagnosis, cases=cases)


def diagnosis(*, said: str = "the answer is 42", noise: float = 0.3) -> Diagnosis:
    return examine([two_turns(0, said=said), two_turns(1, said="hello")], FakeTrainer(noise=noise))


def data_of(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


class TestPage:
    def test_it_loads_nothing_from_anywhere(self):
        page = token_view(diagnosis())
        assert not re.search(r"""(?:src|href)\s*=|url\(|https?://|@import""", page)
        assert "default-src 'none'" in page

    def test_hostile_text_is_data_and_never_markup(self):
        page = token_view(with_hostile_texts(diagnosis()))
        assert page.count("<script") == 2
        assert page.count("</script") == 2
        assert "<img" not in page
        texts = data_of(page)["rollouts"][0]["rows"][0]["texts"]
        assert set(texts) == {HOSTILE}

    def test_hostile_settings_are_escaped(self):
        normal = diagnosis()
        page = token_view(replace(normal, settings={**normal.settings, "model": HOSTILE}))
        assert html.escape(HOSTILE, quote=False).replace("'", "&#39;") in page
        assert page.count("<script") == 2

    def test_every_trained_token_is_there_with_its_facts(self):
        page = token_view(diagnosis())
        scored = scored_tokens([two_turns(0, said="the answer is 42")], FakeTrainer())
        row = data_of(page)["rollouts"][0]["rows"][0]
        assert row["ids"] == scored.batch.rows[0].ids.tolist()
        assert row["at"] == scored.position_N.tolist()
        assert row["samp"] == pytest.approx(scored.samp_N.tolist(), rel=1e-4)
        assert row["diff"] == pytest.approx((np.array(row["samp"]) - np.array(row["train"])).tolist(), abs=1e-3)
        assert set(row["version"]) == {0}
        assert sorted(set(row["turn"])) == [0, 1]
        assert len(row["weight"]) == len(row["class"]) == len(row["at"])

    def test_each_row_gets_the_numbers_of_its_own_tokens(self):
        rollouts = data_of(token_view(diagnosis()))["rollouts"]
        assert [rollout["id"] for rollout in rollouts] == [0, 1]
        for rollout, said in zip(rollouts, ("the answer is 42", "hello"), strict=True):
            (row,) = rollout["rows"]
            sampled = [logprob for call in two_turns(said=said).calls for logprob in call.sampled_logprobs]
            assert row["samp"] == pytest.approx(sampled, rel=1e-4)

    def test_script_json_cannot_end_its_element(self):
        text = script_json({"text": "</script><!--&"})
        assert not set("<>&") & set(text)
        assert json.loads(text) == {"text": "</script><!--&"}

    def test_the_color_scale_is_round_and_at_least_a_hundredth(self):
        assert color_scale([]) == 0.01
        assert color_scale(diagnosis(noise=0.0).distinct_cases) == 0.01
        scale = color_scale(diagnosis(noise=3.0).distinct_cases)
        assert float(f"{scale:.0e}"[0]) in (1, 2, 5)
        assert scale >= 1

    def test_directories_are_created(self, tmp_path: Path):
        write_token_view(tmp_path / "a" / "b.html", diagnosis())
        assert (tmp_path / "a" / "b.html").stat().st_size > 10_000


@needs_chromium
class TestInABrowser:
    def test_the_script_draws_tokens_turns_and_worst_positions(self, tmp_path: Path):
        page = token_view(diagnosis())
        document = dom(page, tmp_path)
        shown = data_of(page)["rollouts"]
        drawn = document.count('class="trained"')
        assert drawn in [sum(len(row["at"]) for row in rollout["rows"]) for rollout in shown]
        assert document.count('class="turn"') == 2
        assert document.count('class="w"') == 12
        assert "rgba(var(--plus)" in document
        assert "rgba(var(--minus)" in document

    def test_a_link_to_a_token_opens_its_details(self, tmp_path: Path):
        page = token_view(diagnosis())
        row = data_of(page)["rollouts"][1]["rows"][0]
        document = dom(page, tmp_path, fragment=f"#1.0.{row['at'][0]}")
        details = document.split('id="details"')[1].split("</div></main>")[0]
        assert "hidden" not in details.split(">")[0]
        assert f"<dt>id</dt><dd>{row['ids'][row['at'][0]]}</dd>" in details
        assert "<dt>logp_samp</dt>" in details
        assert "<dt>weight</dt>" in details
        assert "<dt>version</dt><dd>0</dd>" in details

    def test_hostile_text_is_shown_and_does_nothing(self, tmp_path: Path):
        document = dom(token_view(with_hostile_texts(diagnosis())), tmp_path)
        assert "<title>owned" not in document
        assert "<img" not in document
        assert "&lt;/script&gt;&lt;script&gt;document.title" in document


def test_an_empty_diagnosis_makes_a_page():
    page = token_view(examine([], FakeTrainer()))
    assert data_of(page)["rollouts"] == []


def test_the_tokens_of_an_image_are_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digests = [images_in(tmp_path / "media", monkeypatch).add(picture(1)), "a" * 64]
    rollout = two_turns(0)
    spans = tuple(ImageSpan(start=2 * i, end=2 * i + 2, digest=digest) for i, digest in enumerate(digests))
    with_images = replace(rollout, calls=tuple(replace(call, images=spans) for call in rollout.calls))
    page = token_view(examine([with_images], FakeTrainer(noise=0.3)))
    data = data_of(page)
    [row] = data["rollouts"][0]["rows"]
    assert row["images"] == [[0, 2, digests[0]], [2, 4, digests[1]]]
    assert row["texts"][:4] == ["[image]", "", "[image]", ""]
    assert len(row["texts"]) == len(row["ids"])
    assert data["images"][digests[0]]["url"].startswith("data:image/jpeg;base64,")
    assert data["images"][digests[1]] == {"name": "image aaaaaa…", "url": "", "problem": ABSENT}
    assert f"1 cannot be read ({ABSENT.replace(chr(39), '&#39;')})" in page


@needs_chromium
def test_a_browser_draws_an_image_in_place_of_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digest = images_in(tmp_path / "media", monkeypatch).add(picture(1))
    rollout = two_turns(0)
    span = ImageSpan(start=1, end=5, digest=digest)
    with_images = replace(rollout, calls=tuple(replace(call, images=(span,)) for call in rollout.calls))
    # A link to a token inside of the image opens the page all the same.
    shown = dom(token_view(examine([with_images], FakeTrainer(noise=0.3))), tmp_path, fragment="#0.0.3")
    assert f'alt="image 84x112 {digest[:6]}…"' in shown
    assert f"image 84x112 {digest[:6]}… · 4 tokens" in shown
    positions = re.findall(r'data-row="0" data-at="([0-9]+)"', shown)
    assert positions[:3] == ["0", "1", "5"]
