"""Images of rollouts in W&B and TensorBoard, read back from their files."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lockstep.rollout.media.thumbnail import GAP, MAX_SIDE, one_below_another, side_by_side, thumbnail
from lockstep.trainer.config.groups.model_settings import ImagesConfig
from lockstep.trainer.config.groups.outputs_settings import LoggerConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.observe.metrics_log import MetricsLog, read_metrics
from lockstep.trainer.observe.step_media import COLUMNS, step_media
from lockstep.trainer.observe.trackers import image_table
from tests.fixtures import wandb_files
from tests.fixtures.made_up_model import TOKENIZER
from tests.fixtures.vision import images_in
from tests.unit.trainer.observe.trackers.test_wandb_run import step_report

RED, BLUE = Image.new("RGB", (320, 80), "red"), Image.new("RGB", (40, 60), "blue")
STRIP = side_by_side([thumbnail(RED), BLUE])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


@pytest.fixture
def digests(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of two images of the run, and of one without a file."""
    store = images_in(directory / "media", monkeypatch)
    return [store.add(RED), store.add(BLUE), "e" * 64]


def log_step(directory: Path, *images: Sequence[str], **trackers: object) -> None:
    """Log the media of a step whose rollouts have seen these images, one after the other, the last in a tool's turn."""
    report = step_report()
    for rollout, own in zip(report.rollouts, images, strict=True):
        first, *others = [{"type": "image", "digest": digest} for digest in own]
        turns = [{"role": role, "content": parts} for role, parts in (("user", [first]), ("tool", others)) if parts]
        object.__setattr__(rollout, "messages", (*turns, rollout.messages[-1]))
    config = replace(Config(), logger=LoggerConfig(**trackers))  # type: ignore[arg-type]
    config = replace(config, model=replace(config.model, images=ImagesConfig(max_per_prompt=9)))
    metrics = MetricsLog(directory / "metrics.jsonl", config.logger, run_config={})
    metrics.media(3, lambda: step_media(report, config, TOKENIZER, metrics.tolerating))
    metrics.write(3, {})
    metrics.close()


@pytest.fixture(autouse=True)
def wandb_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep W&B's files that wait for the upload."""
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))


def wandb_table(directory: Path) -> tuple[list[str], list[dict | None]]:
    """Return the columns of the logged table, and its cells of images."""
    table = json.loads(wandb_files.artifact_files(directory)["media/rollouts.table.json"].read_text())
    return table["columns"], [row[-1] for row in table["data"]]


def wandb_image(directory: Path, cell: dict | None) -> Image.Image:
    assert cell is not None
    return Image.open(wandb_files.artifact_files(directory)[cell["path"]]).convert("RGB")


def is_near(image: Image.Image, x: int, y: int, color: tuple[int, int, int]) -> bool:
    """True if a pixel has about this color: JPEG changes it a little."""
    pixel = image.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return all(abs(found - expected) < 12 for found, expected in zip(pixel, color, strict=True))


def test_a_row_of_wandb_shows_the_images_of_its_rollout(directory: Path, digests: list[str]) -> None:
    red, blue, missing = digests
    log_step(directory, [red, blue], [missing, blue], wandb="offline")
    columns, (both, one) = wandb_table(directory)
    assert columns == [*COLUMNS, "images"]
    assert both is not None
    assert both["caption"] == f"{red[:6]}…, {blue[:6]}…"
    image = wandb_image(directory, both)
    assert image.size == (MAX_SIDE + GAP + 40, 60)
    assert is_near(image, 80, 20, (255, 0, 0))
    assert is_near(image, MAX_SIDE + GAP + 20, 30, (0, 0, 255))
    assert is_near(image, 80, 55, (255, 255, 255))
    assert one is not None
    assert one["caption"] == f"eeeeee… (cannot be read), {blue[:6]}…"
    assert wandb_image(directory, one).size == (40, 60)


def test_an_image_without_a_file_is_warned_of_and_counted(
    directory: Path, digests: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    log_step(directory, [digests[2]], [digests[2]], wandb="offline")
    assert wandb_table(directory)[1] == [None, None]
    assert "an image in media/rollouts failed (DataError:" in caplog.text
    assert "eeeeee.png" in caplog.text
    assert read_metrics(directory / "metrics.jsonl")[0]["health/logger_errors"] == 2


def test_a_rollout_of_many_images_shows_the_first(
    directory: Path, digests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_table, "MAX_IMAGES", 1)
    log_step(directory, digests, digests[:1], wandb="offline")
    many, one = wandb_table(directory)[1]
    assert many is not None
    assert one is not None
    assert many["caption"] == f"{digests[0][:6]}…, 2 more"
    assert one["caption"] == f"{digests[0][:6]}…"


def test_tensorboard_has_each_strip_once(directory: Path, digests: list[str]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    red, blue, _ = digests
    for images, expected in (([[red, blue]] * 2, [STRIP]), ([[red, blue], [blue]], [STRIP, BLUE])):
        run = directory / str(len(expected))
        run.mkdir()
        log_step(run, *images, tensorboard=True)
        events = accumulator.EventAccumulator(str(run / "trackers" / "tensorboard"))
        events.Reload()
        (event,) = events.Images("media/rollouts/images")
        assert event.step == 3
        shown = Image.open(io.BytesIO(event.encoded_image_string))
        assert shown.convert("RGB").tobytes() == one_below_another(expected).tobytes()
        assert "media/rollouts/text_summary" in events.Tags()["tensors"]
