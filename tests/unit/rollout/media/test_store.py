from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.rollout.errors import DataError
from lockstep.rollout.media import store as store_module
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.store import ImageStore
from tests.fixtures.vision import picture


def test_an_image_is_kept_once_in_memory_and_once_on_disk(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    digests = {store.add(picture(1)), store.add(picture(1)), store.add(picture(2))}
    assert {path.name for path in (tmp_path / "images").iterdir()} == {f"{digest}.png" for digest in digests}
    read = ImageStore(tmp_path / "images").image(image_digest(picture(1)))
    assert image_digest(read) == image_digest(picture(1))


def test_a_store_with_a_folder_forgets_images_in_memory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "KEPT_BYTES", 2 * 3 * 4 * 4)
    in_memory, on_disk = ImageStore(), ImageStore(tmp_path)
    for store in (in_memory, on_disk):
        digests = [store.add(picture(number, 4, 4)) for number in range(5)]
        assert [image_digest(store.image(digest)) for digest in digests] == digests
    assert [len(store._images) for store in (in_memory, on_disk)] == [5, 2]


def test_a_file_with_another_image_is_refused(tmp_path: Path) -> None:
    digest, other = (ImageStore(tmp_path).add(picture(number)) for number in (1, 2))
    (tmp_path / f"{digest}.png").write_bytes((tmp_path / f"{other}.png").read_bytes())
    with pytest.raises(DataError, match="holds another image than its name says"):
        ImageStore(tmp_path).image(digest)
    (tmp_path / f"{digest}.png").write_bytes(b"")
    with pytest.raises(DataError, match="holds no image"):
        ImageStore(tmp_path).image(digest)


@pytest.mark.parametrize("digest", ["../../etc/passwd", "0" * 64, "", "A" * 64])
def test_an_unknown_digest_is_refused(digest: str, tmp_path: Path) -> None:
    for store in (ImageStore(), ImageStore(tmp_path)):
        with pytest.raises(DataError):
            store.image(digest)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        ImageStore(tmp_path).add(picture(1))
    assert list(tmp_path.iterdir()) == []
