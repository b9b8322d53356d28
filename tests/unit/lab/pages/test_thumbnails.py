"""Thumbnails on pages and sizes in the terminal: each image once, and names for what cannot be shown."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lockstep.lab.inspect_run import Selection, show_run
from lockstep.lab.pages import thumbnails
from lockstep.lab.pages.run_report import report
from lockstep.lab.pages.saved_run import SavedRun
from lockstep.lab.pages.thumbnails import Thumbnails, saved_image, sized_mark
from lockstep.rollout.errors import DataError
from lockstep.rollout.media.store import ImageStore
from lockstep.rollout.media.thumbnail import MAX_SIDE
from lockstep.rollout.records import EngineCall, FinishReason, ImageSpan, Rollout
from tests.fixtures.browser import WIDTHS, dom, needs_chromium
from tests.fixtures.vision import picture
from tests.unit.lab.pages.test_run_report import line, rollout, write_run


def with_images(one: Rollout, *digests: str) -> Rollout:
    parts = [{"type": "image", "digest": digest} for digest in digests]
    message = {"role": "user", "content": [{"type": "text", "text": "see <b>"}, *parts]}
    return replace(one, messages=(message, *one.messages[1:]))


def run_with(tmp_path: Path, *rollouts: Rollout) -> Path:
    return write_run(tmp_path / "run", [line(1), line(2)], list(rollouts))


def media(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "run/media")


def test_a_report_has_each_image_once(tmp_path: Path):
    digest = media(tmp_path).add(picture(1, 800, 400))
    run = run_with(tmp_path, *(with_images(rollout(number, number / 2), digest, digest) for number in range(4)))
    page = report(SavedRun.read(run))
    assert page.count("url(data:image/jpeg;base64,") == 1
    assert page.count(f'class="image image-{digest}"') == 8
    assert f"image 800x400 {digest[:6]}…" in page
    assert f".image-{digest} {{ width: {MAX_SIDE}px; height: {MAX_SIDE // 2}px;" in page
    assert "img-src data:" in page
    assert "see &lt;b&gt;" in page


def test_an_image_without_a_file_has_its_name_and_a_sentence(tmp_path: Path):
    page = report(SavedRun.read(run_with(tmp_path, with_images(rollout(0, 1.0), "a" * 64), rollout(1, 0.0))))
    assert "[image aaaaaa…]" in page
    assert "Of 1 images, 1 cannot be read (its file is not in the run&#39;s folder media)" in page


def test_a_hostile_digest_is_text(tmp_path: Path):
    digest = "{}</style><script>document.title='owned'</script>"
    page = report(SavedRun.read(run_with(tmp_path, with_images(rollout(0, 1.0), digest), rollout(1, 0.0))))
    assert "<script" not in page
    assert page.count("</style>") == 1


def test_a_full_page_names_the_other_images_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(thumbnails, "MAX_IMAGES", 2)
    page = Thumbnails(lambda digest: picture(int(digest[0])))
    made = [page.of(f"{number}" * 64) for number in range(3)]
    assert [bool(one.url) for one in made] == [True, True, False]
    assert page.note == "Of 3 images, 1 are left out: a page shows at most 2. They appear by name."


def test_a_file_is_read_only_if_it_is_the_image_of_its_name(tmp_path: Path):
    digest = media(tmp_path).add(picture(1))
    folder = tmp_path / "run/media"
    assert saved_image(folder, digest) == picture(1)
    Image.new("RGB", (3, 3)).save(folder / f"{digest}.png")
    (folder / f"{'b' * 64}.png").write_text("no image")
    (folder / f"{'c' * 64}.png").mkdir()
    for name in (digest, "b" * 64, "c" * 64, "d" * 64, f"../media/{digest}"):
        with pytest.raises(DataError):
            saved_image(folder, name)


def test_the_terminal_names_size_and_digest_and_folds_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    digest = media(tmp_path).add(picture(1))
    call = EngineCall(
        prompt_ids=(1, *[7] * 20, 2), sampled_ids=(3,), sampled_logprobs=(-0.5,), finish_reason=FinishReason.STOP,
        images=(ImageSpan(start=1, end=21, digest=digest),),
    )  # fmt: skip
    shown = replace(with_images(rollout(0, 1.0), digest), calls=(call,), call_messages=(1,))
    run = run_with(tmp_path, shown, rollout(1, 0.0))
    assert show_run(run, step=None, selection=Selection(rollout_id=0), all_metrics=False, with_tokens=True) == 0
    printed = capsys.readouterr().out
    assert f"see <b> [image 84x112 {digest[:6]}…]" in printed
    assert re.search(rf" 1 +7 +\[image 84x112 {digest[:6]}…\] 20 tokens", printed)
    assert len(re.findall(r"^ +[0-9]+ +7 ", printed, re.MULTILINE)) == 1
    assert sized_mark(run / "media")({"type": "image", "digest": "e" * 64}).startswith("[image eeeeee…: its file")


@needs_chromium
def test_images_do_not_overflow_on_a_phone(tmp_path: Path):
    digests = [media(tmp_path).add(picture(number, 800, 90)) for number in range(4)]
    page = report(SavedRun.read(run_with(tmp_path, with_images(rollout(0, 1.0), *digests), rollout(1, 0.0))))
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)  # it would block the measuring script
    title = re.search("<title>(.*?)</title>", dom(page.replace("</body>", f"{WIDTHS}</body>"), tmp_path, width=500))
    assert title is not None
    assert json.loads(html.unescape(title[1]))["wide"] == []
