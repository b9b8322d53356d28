"""Images of data rows: every form in which a file holds them, refused ones, and when they are decoded."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Barrier
from typing import Any

import datasets
import pyarrow
import pytest
from PIL import Image, ImageFile
from pyarrow import parquet

from lockstep.rollout.environments.prompt import PromptReader
from lockstep.rollout.errors import DataError
from lockstep.rollout.media.image_files import image_digest
from lockstep.rollout.media.store import ImageStore
from lockstep.trainer.checks.scale import overlap_warnings
from lockstep.trainer.config.groups.data_settings import DataSetConfig
from lockstep.trainer.config.schema import Config
from lockstep.trainer.data.given_rows import given_rows
from lockstep.trainer.data.prompts import DataSet, Prompts, load_data_set, training_data


def picture(number: int) -> Image.Image:
    return Image.effect_noise((20 + number, 30), 64).convert("RGB")


PICTURES = [picture(number) for number in range(3)]


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


BYTES = [encoded(one) for one in PICTURES]
URLS = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in BYTES]
PARTS = [{"type": "image", "digest": image_digest(one)} for one in PICTURES]
ASKED = {"prompt": "what?", "answer": "x"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for number, content in enumerate(BYTES):
        (tmp_path / f"pictures/{number}.png").write_bytes(content)
    return tmp_path


def write_json(path: Path, rows: list[Any]) -> Path:
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n" if path.suffix == ".jsonl" else f"[{','.join(lines)}]")
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_table(path: Path, rows: list[dict[str, Any]], **types: pyarrow.DataType) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    for name, kind in types.items():
        index = table.column_names.index(name)
        table = table.set_column(index, name, table.column(name).cast(kind))
    parquet.write_table(table, path)
    return path


def config(path: Path, columns: dict[str, str | None] | None = None, **settings: Any) -> Config:
    made = Config()
    made.data.path, made.data.columns = str(path), columns or {}
    made.environment.name, made.environment.settings = "single_turn", settings
    made.reward.functions = ["exact_match"]
    return made


def loaded(
    path: Path | str, columns: dict[str, str | None] | None = None, *, most: int = 2, **settings: Any
) -> DataSet:
    made = config(path, columns, **settings)
    (data,) = training_data(made.data, made.environment, made.reward, store=ImageStore(), max_images=most)
    return data


def refused(path: Path, columns: dict[str, str | None] | None = None, *, most: int = 2) -> str:
    with pytest.raises(DataError) as error:
        loaded(path, columns, most=most)
    return str(error.value)


def check_row(data: DataSet, *parts: dict[str, Any], column: str = "images") -> None:
    """Check that the first row holds the parts and nothing that is not JSON."""
    row = data[0]
    assert json.loads(json.dumps(row)) == row
    assert row["images"] == list(parts)
    assert row[column] in (list(parts), parts[0])
    (turn,) = PromptReader().messages(row)
    assert turn["content"] == [*parts, {"type": "text", "text": "what?"}]


@pytest.mark.parametrize("column", ["images", "image"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_paths_and_data_urls_of_json(folder: Path, column: str, suffix: str) -> None:
    absolute = str(folder / "pictures/1.png")
    for value, numbers in (
        ("pictures/0.png", [0]),
        (absolute, [1]),
        (f"file://{absolute}", [1]),
        (URLS[2], [2]),
        (["pictures/0.png", URLS[2]], [0, 2]),
        ([{"type": "image", "image": "pictures/0.png"}, {"type": "image_url", "image_url": {"url": URLS[1]}}], [0, 1]),
        ({"bytes": None, "path": "pictures/1.png"}, [1]),
    ):
        path = write_json(folder / f"rows{suffix}", [{**ASKED, column: value}])
        check_row(loaded(path), *(PARTS[number] for number in numbers), column=column)


def test_rows_of_a_step_are_read_side_by_side_and_keep_their_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"what is {i}?", "answer": "x", "image": f"pictures/{i % 3}.png"} for i in range(3)]
    data = loaded(write_json(folder / "rows.jsonl", rows))
    serial = [data[index] for index in range(3)]
    both, read = Barrier(2, timeout=60), DataSet.__getitem__

    def meet(data: DataSet, index: int) -> Any:
        if index < 2:
            both.wait()
        return read(data, index)

    monkeypatch.setattr(DataSet, "__getitem__", meet)
    assert Prompts([data], seed=0, shuffle=False).take(3) == serial


def test_paths_of_csv(folder: Path) -> None:
    data = loaded(write_csv(folder / "rows.csv", [{**ASKED, "image": "pictures/0.png"}, {**ASKED, "image": ""}]))
    check_row(data, PARTS[0], column="image")
    assert data[1]["images"] == []
    assert PromptReader().messages(data[1])[0]["content"] == "what?"


def test_bytes_of_parquet(tmp_path: Path) -> None:
    rows = [{**ASKED, "image": BYTES[0]}]
    check_row(loaded(write_table(tmp_path / "one.parquet", rows)), PARTS[0], column="image")
    check_row(loaded(write_table(tmp_path / "large.parquet", rows, image=pyarrow.large_binary())), PARTS[0])
    check_row(loaded(write_table(tmp_path / "more.parquet", [{**ASKED, "images": BYTES[:2]}])), *PARTS[:2])


def image_table(folder: Path) -> datasets.Dataset:
    values = {
        "prompt": ["what?"],
        "answer": ["x"],
        "image": [{"bytes": BYTES[0], "path": "elsewhere.png"}],
        "images": [[str(folder / "pictures/1.png"), str(folder / "pictures/2.png")]],
    }
    features = datasets.Features(
        prompt=datasets.Value("string"),
        answer=datasets.Value("string"),
        image=datasets.Image(),
        images=datasets.List(datasets.Image()),
    )
    return datasets.Dataset.from_dict(values, features=features)


@pytest.mark.parametrize(("column", "numbers"), [("image", [0]), ("images", [1, 2])])
def test_columns_of_images_of_datasets(folder: Path, column: str, numbers: list[int]) -> None:
    left_out: dict[str, str | None] = {"images" if column == "image" else "image": None}
    parts = [PARTS[number] for number in numbers]
    table = image_table(folder)
    table.to_parquet(folder / "rows.parquet")
    check_row(loaded(folder / "rows.parquet", left_out), *parts, column=column)
    (folder / "like_the_hub").mkdir()
    (folder / "rows.parquet").rename(folder / "like_the_hub/train.parquet")
    check_row(loaded(folder / "like_the_hub", left_out), *parts, column=column)
    settings = DataSetConfig(path="rows", columns=left_out)
    check_row(DataSet(given_rows(table, of="data")[1], settings, store=ImageStore()), *parts, column=column)


def test_images_of_another_column(folder: Path) -> None:
    table = image_table(folder).remove_columns("images").rename_column("image", "picture")
    table.to_parquet(folder / "rows.parquet")
    data = loaded(folder / "rows.parquet", {"images": "picture"})
    check_row(data, PARTS[0], column="picture")
    check_row(loaded(folder / "rows.parquet", {"image": "picture"}), PARTS[0], column="image")
    path = write_json(folder / "rows.jsonl", [{**ASKED, "meta": {"picture": "pictures/0.png"}}])
    check_row(loaded(path, {"images": "meta.picture"}), PARTS[0])
    said = refused(folder / "rows.parquet")
    assert "column picture holds an image that no prompt shows; set 'data.columns={images: picture}', or leave" in said


STRUCT = {"bytes": BYTES[0], "path": "elsewhere.png"}


def rows_of(kind: str, rows: list[Any], folder: Path, columns: dict[str, str | None] | None = None) -> DataSet:
    """Return rows of Python or of a parquet file, of which every row has been checked."""
    if kind == "parquet":
        return loaded(write_table(folder / "rows.parquet", rows), columns)
    given = datasets.Dataset.from_list(rows) if kind == "table" else rows
    return DataSet(given_rows(given, of="data")[1], DataSetConfig(path="rows", columns=columns), store=ImageStore())


@pytest.mark.parametrize("kind", ["parquet", "python"])
@pytest.mark.parametrize(
    ("value", "path", "numbers"),
    [
        ({"pictures": [STRUCT], "n": 1}, "meta.pictures", [0]),
        ({"picture": STRUCT, "n": 1}, "meta.picture", [0]),
        ({"of": {"pictures": [{"bytes": one, "path": None} for one in BYTES[:2]]}}, "meta.of.pictures", [0, 1]),
        ([{"image": STRUCT}, {"image": {"bytes": BYTES[1], "path": None}}], "meta", [0, 1]),
        ([{"url": URLS[2]}], "meta", [2]),
    ],
)
def test_images_inside_of_a_column(folder: Path, kind: str, value: Any, path: str, numbers: list[int]) -> None:
    data = rows_of(kind, [{**ASKED, "meta": value}], folder, {"images": path})
    check_row(data, *(PARTS[number] for number in numbers))


@pytest.mark.parametrize("kind", ["table", "parquet", "python"])
def test_messages_inside_of_a_column(folder: Path, kind: str) -> None:
    for part in (
        {"type": "image", "image": STRUCT},
        {"type": "image", "image": {"bytes": BYTES[0], "path": None}},
        {"type": "image_url", "image_url": STRUCT},
        {"type": "image", "image": {"url": URLS[0]}},
        {"type": "image_url", "image_url": {"url": URLS[0], "detail": "low"}},
    ):
        chat = {"turns": [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}], "id": 3}
        row = rows_of(kind, [{"chat": chat, "answer": "x"}], folder, {"prompt": "chat.turns"})[0]
        assert json.loads(json.dumps(row)) == row, "no bytes, also in the other column"
        assert row["chat"]["turns"][0]["content"][0] == PARTS[0]
        assert PromptReader().messages(row)[0]["content"][0] == PARTS[0]


@pytest.mark.parametrize("kind", ["parquet", "python"])
@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"meta": {"pictures": [STRUCT], "n": 1}},
            "column meta.pictures holds an image that no prompt shows; set 'data",
        ),
        (
            {"meta": {"shots": [{"picture": STRUCT}]}},
            "column meta.shots[0].picture holds an image that no prompt shows;",
        ),
        ({"image": BYTES[0], "meta": {"raw": BYTES[1]}}, "or leave it out: 'data.columns={meta: null}'"),
        ({"images": [{"left": STRUCT}]}, "column images, image 0: found an image with the keys left; expected a path"),
        ({"images": [{"image": STRUCT, "max_pixels": 999}]}, "column images, image 0: found max_pixels of an image;"),
    ],
)
def test_images_that_no_prompt_shows_are_refused_with_their_path(folder: Path, kind: str, row: Any, words: str) -> None:
    with pytest.raises(DataError) as error:
        rows_of(kind, [{**ASKED, **row}], folder)[0]
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "<image>", "images": ["pictures/0.png"]}, "message 0: found images in its key images; expected"),
        ({"content": [{"type": "image", "source": {"data": "iVBO"}}]}, "part 0: found an image with the keys source;"),
        ({"content": [{"type": "input_image", "image_url": URLS[0]}]}, '"type": "input_image", expected "image"'),
        ({"content": [{"image": "pictures/0.png"}]}, 'part 0: found an image and "type": null, expected "image"'),
        (
            {"content": [{"type": "image", "index": 1}, {"type": "image", "index": 0}]},
            "column prompt: its images have the indices [1, 0], expected [0, 1]",
        ),
    ],
)
def test_an_image_of_a_message_in_another_form_is_refused(folder: Path, message: Any, words: str) -> None:
    row = {"prompt": [{"role": "user", **message}], "images": ["pictures/1.png", "pictures/2.png"], "answer": "x"}
    assert words in refused(write_json(folder / "rows.jsonl", [row]))


@pytest.mark.parametrize("kind", [list, lambda rows: lambda: iter(rows)])
def test_rows_of_python_with_images_of_pil(folder: Path, kind: Callable[[list[Any]], Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": PICTURES[1]}, {"type": "text", "text": "a"}]}]
    rows = [
        {**ASKED, "images": [PICTURES[0], BYTES[1], Image.open(folder / "pictures/2.png")]},
        {**ASKED, "images": PICTURES[0].convert("CMYK")},
        {"messages": messages, "answer": "x"},
    ]
    name, given = given_rows(kind(rows), of="data")
    assert name == given_rows(kind(rows), of="data")[0], "the same rows have the same name"
    data = DataSet(given, DataSetConfig(path="rows"), store=ImageStore())
    check_row(data, *PARTS)
    assert data[1]["images"] == [{"type": "image", "digest": image_digest(PICTURES[0].convert("CMYK").convert("RGB"))}]
    assert data[2]["messages"][0]["content"][0] == PARTS[1]


def test_an_image_of_pil_that_cannot_be_read_is_refused_with_its_row(folder: Path) -> None:
    (folder / "cut.png").write_bytes(BYTES[0][:-200])
    with pytest.raises(DataError, match="row 1: PIL image: the image cannot be read"):
        given_rows([ASKED, {**ASKED, "image": Image.open(folder / "cut.png")}], of="data")


def message_rows() -> Iterable[tuple[Any, list[Any]]]:
    yield {"type": "image", "image": "pictures/0.png"}, [PARTS[0]]
    yield {"type": "image", "path": "pictures/0.png"}, [PARTS[0]]
    yield {"type": "image", "url": URLS[1]}, [PARTS[1]]
    yield {"type": "image_url", "image_url": {"url": URLS[1]}}, [PARTS[1]]
    yield {"type": "image_url", "image_url": URLS[1]}, [PARTS[1]]


@pytest.mark.parametrize("column", ["messages", "prompt", "chat"])
def test_parts_of_messages_with_values(folder: Path, column: str) -> None:
    for part, parts in message_rows():
        chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
        path = write_json(folder / "rows.jsonl", [{"answer": "x", column: chat}])
        row = loaded(path, prompt_column=column)[0]
        assert row[column] == [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]
        assert row["images"] == []
        assert PromptReader(column=column).messages(row) == tuple(row[column])


def test_messages_of_parquet_with_bytes_and_with_places(tmp_path: Path) -> None:
    empty = {"bytes": None, "path": None}
    content = [
        {"type": "image", "text": None, "image": {"bytes": BYTES[0], "path": None}},
        {"type": "text", "text": "a", "image": None},
        {"type": "image", "text": None, "image": empty},
    ]
    rows = [{"messages": [{"role": "user", "content": content}], "answer": "x", "images": [BYTES[1]]}]
    row = loaded(write_table(tmp_path / "rows.parquet", rows))[0]
    (turn,) = PromptReader().messages(row)
    assert [turn["content"][0], turn["content"][2]] == PARTS[:2]
    assert json.loads(json.dumps(row)) == row


def test_a_system_prompt_of_the_data_and_a_template_keep_the_images(folder: Path) -> None:
    path = write_json(folder / "rows.jsonl", [{**ASKED, "prompt": "<image> what?", "image": "pictures/0.png"}])
    made = config(path)
    made.data.system_prompt = "Be brief about <image>."
    (data,) = training_data(made.data, made.environment, made.reward, store=ImageStore(), max_images=1)
    system, turn = PromptReader(template="Q: {prompt}").messages(data[0])
    assert system["content"] == "Be brief about <image>."
    assert turn["content"] == [PARTS[0], {"type": "text", "text": " what?"}]
    (turn,) = PromptReader(template="Q: {prompt}").messages(loaded(path)[0])
    assert turn["content"] == [{"type": "text", "text": "Q: "}, PARTS[0], {"type": "text", "text": " what?"}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"image": "none.png"}, "column image, image 0: the image cannot be read: [Errno 2] No such file"),
        (
            {"images": ["pictures/0.png", "rows.jsonl"]},
            "column images, image 1: the image cannot be read: cannot",
        ),
        (
            {"image": "https://x.org/a.png"},
            "column image, image 0: the image cannot be read: https:// addr",
        ),
        ({"image": "data:image/png;base64,!"}, "its data URL is not base64"),
        ({"image": 5}, "column image, image 0: the image is of type int; expected a path"),
        ({"images": [None]}, "column images, image 0: the image is of type NoneType"),
        ({"images": [PARTS[0]]}, "column images, image 0: found an image of another run, by its digest"),
        (
            {"images": ["pictures/0.png"] * 3},
            "the prompt has 3 images, model.images.max_per_prompt=2; set",
        ),
        ({"image": "pictures/0.png", "images": ["pictures/1.png"]}, "columns images and image both hold images"),
        (
            {"image": "pictures/0.png", "prompt": "<image><image>"},
            "places for images in the prompt: 2 (<image> in",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "places for images in the prompt: 1 (parts"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "none.png"}]}]},
            "column prompt, message 0, part 0: the image cannot be read: [Errno 2]",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": URLS[0]}] * 3}]},
            "the prompt has 3 images, model.images.max_per_prompt=2",
        ),
        (
            {"picture": {"bytes": None, "path": "pictures/0.png"}},
            "set 'data.columns={images: picture}', or",
        ),
    ],
)
def test_an_image_that_cannot_be_used_is_refused_with_its_place(folder: Path, row: Any, words: str) -> None:
    rows = [{**ASKED, "image": "pictures/0.png"}, {**ASKED, **row}, ASKED]
    said = refused(write_json(folder / "rows.jsonl", rows))
    assert "rows.jsonl: 1 of 3 rows cannot be used" in said
    assert f"\n  line 2: {words}" in said or ("\n  line 2: " in said and words in said), said


def test_an_image_of_too_many_pixels_is_refused_by_its_header(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.rollout.media.image_files.MAX_PIXELS", 600)
    path = write_json(
        folder / "rows.jsonl", [{**ASKED, "image": "pictures/0.png"}, {**ASKED, "image": "pictures/1.png"}]
    )
    assert "1 of 2 rows" in (said := refused(path))
    assert "line 2: column image, image 0: the image cannot be read: it has 21 x 30 pixels, expected 1 to 600" in said


def test_a_relative_path_of_a_data_set_of_the_hub_is_refused() -> None:
    data = DataSet([{**ASKED, "image": "a.png"}], DataSetConfig(path="owner/name"), store=ImageStore())
    with pytest.raises(DataError, match=r"row 0: column image, image 0: the path 'a.png' is relative"):
        data[0]


def test_the_check_decodes_nothing_and_a_row_its_own_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_table(folder).remove_columns("images").to_parquet(folder / "rows.parquet")
    decoded = []
    whole = ImageFile.ImageFile.load

    def load(self: ImageFile.ImageFile) -> Any:
        decoded.append(self)
        return whole(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    paths = [
        write_json(folder / "rows.jsonl", [{**ASKED, "images": [f"pictures/{i}.png", URLS[i]]} for i in range(3)]),
        folder / "rows.parquet",
    ]
    tables = [loaded(path) for path in paths]
    assert not decoded
    assert [data[0]["images"][0] for data in tables] == [PARTS[0], PARTS[0]]
    assert decoded


def test_a_file_that_ends_early_fails_the_rollouts_of_its_row_and_not_the_run(folder: Path) -> None:
    (folder / "cut.png").write_bytes(BYTES[0][:-200])
    path = write_json(folder / "rows.jsonl", [{**ASKED, "image": "pictures/0.png"}, {**ASKED, "image": "cut.png"}])
    store = ImageStore()
    made = config(path)
    (data,) = training_data(made.data, made.environment, made.reward, store=store, max_images=9)
    check_row(data, PARTS[0])
    (turn,) = PromptReader().messages(data[1])
    with pytest.raises(DataError, match=r"^column image, image 0: the image cannot be read: "):
        store.image(turn["content"][0]["digest"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"images": ["pictures/0.png"]},
            "column images holds images; set model.images.max_per_prompt=<the most images of a",
        ),
        ({"image": "pictures/0.png"}, "or leave it out: set 'data.columns={image: null}'"),
        (
            {"images": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
            "column images holds images; set model.im",
        ),
        ({"photo": {"bytes": None, "path": "a.png"}}, "'data.columns={images: photo}', or leave it out: set 'data.col"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "its messages hold images; set",
        ),
    ],
)
def test_images_are_refused_in_a_run_without(folder: Path, row: Any, words: str) -> None:
    made = config(write_json(folder / "rows.jsonl", [ASKED, {**ASKED, "image": None, "images": []}, {**ASKED, **row}]))
    with pytest.raises(DataError) as error:
        training_data(made.data, made.environment, made.reward)
    assert "1 of 3 rows" in str(error.value)
    assert words in str(error.value)
    made.data.columns = dict.fromkeys(row.keys() - ASKED.keys())
    if made.data.columns:
        (data,) = training_data(made.data, made.environment, made.reward)
        assert "<image>" not in str(data[2])
        assert dict(data[2]) == {**ASKED}


def test_columns_of_images_are_refused_in_a_run_without(folder: Path) -> None:
    image_table(folder).to_parquet(folder / "rows.parquet")
    settings = DataSetConfig(path=str(folder / "rows.parquet"), split="train")
    with pytest.raises(
        DataError, match=r"column image holds images; set model.images.max_per_prompt=<the most images of a"
    ):
        load_data_set(settings)
    settings.columns = {"image": None}
    with pytest.raises(DataError, match=r"column images holds images; .* set 'data.columns=\{images: null\}'"):
        load_data_set(settings)
    settings.columns = {"image": None, "images": None}
    assert load_data_set(settings)[0] == ASKED


def test_the_same_question_about_another_image_is_another_row(folder: Path) -> None:
    def data(name: str, *images: str) -> DataSet:
        path = write_json(folder / name, [{**ASKED, "picture": image} for image in images])
        return load_data_set(
            DataSetConfig(path=str(path), split="train", columns={"image": "picture"}), store=ImageStore()
        )

    training = data("train.jsonl", "pictures/0.png", URLS[1])
    assert not list(
        overlap_warnings([training], {"": data("a.jsonl", "pictures/1.png")}, PromptReader(), evaluated=None)
    )
    heldout = data("b.jsonl", "pictures/0.png", "pictures/1.png", URLS[1])
    (sentence,) = overlap_warnings([training], {"": heldout}, PromptReader(), evaluated=None)
    assert sentence.startswith("2 of 3 evaluated rows")
