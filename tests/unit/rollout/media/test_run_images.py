"""Images of the run for code that gets messages: pixels, data URLs, other processes, and runs without images."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lockstep.rollout.errors import DataError
from lockstep.rollout.media.run_images import FOLDER, image_url, open_image, run_images, run_store
from tests.fixtures.vision import images_in, picture


def test_a_part_is_opened_as_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = {"type": "image", "digest": images_in(tmp_path, monkeypatch).add(picture(1))}
    image = open_image(part)
    assert image == picture(1)
    image.paste("black", (0, 0, 9, 9))
    assert open_image(part) == picture(1)


def test_a_data_url_holds_the_png_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = {"type": "image", "digest": images_in(tmp_path, monkeypatch).add(picture(1))}
    head, _, data = image_url(part).partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") == picture(1)


@pytest.mark.parametrize("digest", ["0" * 64, "../secret", "", None])
@pytest.mark.parametrize("read", [open_image, image_url])
def test_what_is_not_an_image_of_the_run_is_refused(read, digest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images_in(tmp_path / "media", monkeypatch)
    (tmp_path / "secret.png").write_bytes(b"secret")
    with pytest.raises(DataError):
        read({"type": "image", "digest": digest})


def test_a_run_without_images_says_which_setting_gives_some(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(DataError, match=r"model\.images\.max_per_prompt"):
        open_image({"type": "image", "digest": "0" * 64})


def test_the_images_of_messages_are_found_once_each_in_order():
    first, second = ({"type": "image", "digest": digit * 64} for digit in "ba")
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [first, {"type": "text", "text": "see"}, second, first]},
        {"role": "assistant", "content": None},
    ]
    assert run_images(messages) == [first, second]


def test_the_folder_of_a_process_is_deleted_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(FOLDER, raising=False)
    code = (
        "import os, sys; from PIL import Image; from lockstep.rollout.media.run_images import FOLDER, run_store; "
        "digest = run_store(None).add(Image.new('RGB', (4, 4))); "
        "folder = os.environ[FOLDER]; assert os.listdir(folder) == [digest + '.png']; print(folder)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert not Path(done.stdout.strip()).exists()


def test_the_latest_run_of_a_process_is_the_one_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = {"type": "image", "digest": images_in(tmp_path / "one", monkeypatch).add(picture(1))}
    run_store(tmp_path / "two")
    with pytest.raises(DataError):
        open_image(part)
