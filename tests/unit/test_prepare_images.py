"""prepare_data of rows with images: formats, accounts, and what is stored."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.data.images import open_rgb
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tests import tiny, tiny_vision
from tests.tiny_vision import IMAGE_ID, file_of, picture
from tests.unit.picture_rows import kept, llava, rejected, settings, splits, write, write_pictures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_vision_model(tmp_path_factory.mktemp("model") / "m")


# --- rows ---------------------------------------------------------------------------------------


def test_pictures_are_listed_with_their_faults_before_any_training(tmp_path: Path, model: Path) -> None:
    """D17, haotian-liu/LLaVA#1618 and #546: good, missing, empty, a web page called .jpg, and a row without images."""
    folder = write_pictures(tmp_path, 8)
    (folder / "2.png").unlink()
    (folder / "3.png").write_bytes(b"")
    (folder / "4.jpg").write_text("<!DOCTYPE html><html><body>Not Found</body></html>")
    (folder / "5.png").write_bytes((folder / "5.png").read_bytes()[:60])
    rows = [llava(number) for number in range(8)]
    rows[4]["image"] = "img/4.jpg"
    rows[6]["image"] = "../../../etc/passwd"
    text_only = {
        "id": "t",
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
    }
    write(tmp_path, [*rows, text_only])
    manifest = prepare_data(settings(model), Paths(tmp_path))
    assert manifest.balanced and manifest.rows_in == 9 and kept(manifest) == 4
    wanted = {
        3: "an image that is missing",
        4: "an image file that is empty",
        5: "a web page in place of an image",
        6: "an image that is damaged or cut off",
        7: "an image path that leaves the folder of its source",
    }
    assert {line["row"]: line["reason"] for line in rejected(tmp_path)} == wanted
    assert all(
        line["fix"] and line["found"] and line["file"] == "data/raw/rows.json" for line in rejected(tmp_path)
    )
    counts = [len(split.images(row)) for split in splits(tmp_path) for row in range(len(split))]
    assert sorted(counts) == [0, 1, 1, 1]
    assert manifest.pictures == 3 == manifest.train.images + manifest.validation.images
    with pytest.raises(
        UserError, match=r"rows\.json: row 3: an image that is missing.*img/2\.png.*put it there"
    ):
        prepare_data(settings(model, **{"prepare_data.on_bad_row": "stop"}), Paths(tmp_path))


def test_every_format_with_images_and_rows_without(tmp_path: Path, model: Path) -> None:
    folder = write_pictures(tmp_path, 12)
    content = (folder / "5.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode((folder / "6.png").read_bytes()).decode()
    said = {"role": "assistant", "content": "a cat"}
    rows: list[Any] = [
        llava(0),
        {"instruction": "<image>name it 1", "input": "", "output": "one", "image": "img/1.png"},
        {"instruction": "name it", "input": "", "output": "without"},
        {"messages": [{"role": "user", "content": "<image>which 2?"}, said], "images": ["img/2.png"]},
        {
            "messages": [{"role": "user", "content": "<image> or <image> 3?"}, said],
            "images": ["img/3.png", "img/4.png"],
        },
        {
            "messages": [{"role": "user", "content": "<image>bytes?"}, said],
            "images": [{"bytes": base64.b64encode(content).decode()}],
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "a data URL?"},
                    ],
                },
                said,
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "path": "img/7.png"}, {"type": "text", "text": "part?"}],
                },
                said,
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "<image>first?"},
                said,
                {"role": "user", "content": "<image>second?"},
                said,
            ],
            "images": ["img/8.png", "img/9.png"],
        },
        {"prompt": "see <image>: ", "completion": "ten", "images": "img/10.png"},
        {"text": "A text with <image> in it.", "image": "img/11.png"},
    ]
    write(tmp_path, rows)
    manifest = prepare_data(settings(model), Paths(tmp_path))
    assert rejected(tmp_path) == [] and kept(manifest) == len(rows)
    assert manifest.pictures == 12
    tokens = 0
    for split in splits(tmp_path):
        for row in range(len(split)):
            ids, labels = split.tokens(row)
            shown = split.images(row)
            assert split.prompt_images(row) == shown or split.reference(row).startswith("A text")
            of_images = ids == IMAGE_ID
            tokens += int(of_images.sum())
            assert int(of_images.sum()) == sum(image.tokens for image in shown)
            assert (labels[of_images] == -100).all()
    assert tokens == manifest.train.image_tokens + manifest.validation.image_tokens > 0


def test_a_parquet_struct_of_bytes_gives_what_files_give(tmp_path: Path, model: Path) -> None:
    write_pictures(tmp_path / "files", 10)
    rows = [llava(number) for number in range(10)]
    write(tmp_path / "files", rows)
    (tmp_path / "table" / "data" / "raw").mkdir(parents=True)
    folder = tmp_path / "files" / "data" / "raw"
    for row in rows:
        row["image"] = {"bytes": (folder / row["image"]).read_bytes(), "path": None}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "table" / "data" / "raw" / "rows.parquet")
    made = [
        prepare_data(settings(model, name), Paths(tmp_path / place))
        for place, name in (("files", "rows.json"), ("table", "rows.parquet"))
    ]
    assert made[0].content_hash == made[1].content_hash
    assert made[0].pictures == made[1].pictures == 10


def test_a_base_that_sees_nothing_refuses_images_alone(tmp_path: Path) -> None:
    blind = tiny.write_model(tmp_path / "blind")
    write_pictures(tmp_path, 4)
    words = [{"instruction": f"count to {n}", "input": "", "output": f"it is {n * 7}"} for n in range(9)]
    speaks = {"instruction": "what is <image> in SVG?", "input": "", "output": "a tag"}
    write(tmp_path, [*words, speaks, *(llava(number) for number in range(4))])
    manifest = prepare_data(settings(blind), Paths(tmp_path))
    assert manifest.rejected == {"it has images, which this model is not shown": 4}
    assert kept(manifest) == 10 and manifest.pictures == 0
    assert not (Paths(tmp_path).prepared / "images.arrow").exists()
    assert all(split.images(0) == [] == split.prompt_images(0) for split in splits(tmp_path))


# --- what is stored -----------------------------------------------------------------------------


def test_each_picture_is_stored_once_and_read_back_as_it_is_to_be_shown(tmp_path: Path, model: Path) -> None:
    folder = write_pictures(tmp_path, 12)
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "4.png").write_bytes(file_of(picture(20, 8, 4), "PNG", exif=exif))
    (folder / "5.png").write_bytes(file_of(picture(9, 9, 5).convert("RGBA"), "PNG"))
    (folder / "6.png").write_bytes(file_of(picture(9, 9, 6), "JPEG"))
    shutil.copy(folder / "0.png", folder / "again.png")
    names = [f"{number}.png" for number in range(12)] + ["0.png", "again.png"]
    write(tmp_path, [llava(number, image=f"img/{name}") for number, name in enumerate(names)])
    manifest = prepare_data(settings(model), Paths(tmp_path))
    assert kept(manifest) == 14 and manifest.pictures == 12
    stored_album = splits(tmp_path)[0].album
    assert stored_album is not None
    stored = stored_album.column("identity").to_pylist()
    identities = {name: hashlib.sha256((folder / name).read_bytes()).digest()[:16] for name in names}
    assert stored == sorted(set(identities.values()))
    for split in splits(tmp_path):
        for row in range(len(split)):
            (image,) = split.images(row)
            name = names[int(split.prompt(row).messages[0]["content"].rpartition(" ")[2].rstrip("?"))]
            assert stored[image.number] == identities[name]
            shown = np.asarray(open_rgb(image.content))
            assert shown.shape == (image.height, image.width, 3)
            wanted = np.asarray(Image.open(folder / name).convert("RGB"))
            assert np.array_equal(shown, np.rot90(wanted, -1) if name == "4.png" else wanted)
            assert (image.content == (folder / name).read_bytes()) == (name not in ("4.png", "5.png"))
            sizes = split.image_sizes()[image.number]
            assert sizes.tolist() == [image.width, image.height, image.tokens]


def test_rows_about_one_picture_stay_on_one_side(tmp_path: Path, model: Path) -> None:
    write_pictures(tmp_path, 10)
    rows = [llava(number, image=f"img/{number % 10}.png") for number in range(60)]
    write(tmp_path, rows)
    manifest = prepare_data(settings(model), Paths(tmp_path))
    sides = [{split.image_numbers(row)[0] for row in range(len(split))} for split in splits(tmp_path)]
    assert kept(manifest) == 60 and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 10


def test_the_same_words_about_other_pictures_are_other_rows(tmp_path: Path, model: Path) -> None:
    folder = write_pictures(tmp_path, 30)
    shutil.copy(folder / "0.png", folder / "copy.png")
    rows = []
    for number in range(30):
        turns = [
            {"from": "human", "value": "<image>\nWhat is shown here, please?"},
            {"from": "gpt", "value": "A seven."},
        ]
        rows.append({"image": f"img/{number}.png", "conversations": turns})
    rows.append(rows[0] | {"image": "img/copy.png"})
    write(tmp_path, rows)
    manifest = prepare_data(
        settings(model, **{"prepare_data.near_duplicate_threshold": 0.5}), Paths(tmp_path)
    )
    assert manifest.rejected == {"duplicate": 1} and kept(manifest) == 30


def test_a_cut_row_shows_the_pictures_before_the_cut(tmp_path: Path, model: Path) -> None:
    write_pictures(tmp_path, 12)
    rows = [llava(number) for number in range(12)]
    for number, row in enumerate(rows[:6]):
        row["image"] = [row["image"], f"img/{number + 6}.png"]
        row["conversations"] += [
            {"from": "human", "value": "<image>" + "z" * 300},
            {"from": "gpt", "value": "b"},
        ]
    write(tmp_path, rows)
    manifest = prepare_data(settings(model, **{"prepare_data.max_length": 300}), Paths(tmp_path))
    assert manifest.truncated == 6 and manifest.pictures == 12
    assert manifest.train.images + manifest.validation.images == 12
    found = [
        (len(split.images(row)), len(split.prompt_images(row)))
        for split in splits(tmp_path)
        for row in range(len(split))
    ]
    assert sorted(found) == [(1, 1)] * 6 + [(1, 2)] * 6
