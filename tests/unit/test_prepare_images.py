"""prepare_data of rows with images: formats, accounts, what is stored, and that nothing of it depends on the way."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.commands.data import look
from tasks.contracts import DataManifest
from tasks.data import album, parts
from tasks.data.images import open_rgb
from tasks.data.prepared import Split
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tests import tiny, tiny_vision
from tests.tiny_vision import IMAGE_ID, PARTS, file_of, picture, write_picture

WORDS = ("red", "blue", "a cat", "a house", "two birds", "a street at night")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_vision_model(tmp_path_factory.mktemp("model") / "m")


def settings(model: Path, name: str = "rows.json", **changes: Any) -> Params:
    keys: dict[str, Any] = {
        "model.name_or_path": str(model),
        "prepare_data.source": f"data/raw/{name}",
        "prepare_data.validation_fraction": 0.3,
        "prepare_data.near_duplicate_threshold": 1.0,
        "prepare_data.on_bad_row": "reject",
        "prepare_data.max_rejected": 1.0,
    }
    return tiny.params(**keys | changes)


def write(root: Path, rows: list[Any], name: str = "rows.json") -> Path:
    file = root / "data" / "raw" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows), encoding="utf-8")
    return file


def llava(number: int, **more: Any) -> dict[str, Any]:
    """As haotian-liu/LLaVA's files have it."""
    turns = [{"from": "human", "value": f"<image>\nWhat is in picture {number}?"}]
    turns.append({"from": "gpt", "value": f"It is {WORDS[number % len(WORDS)]}, number {number}."})
    return {"id": str(number), "image": f"img/{number}.png", "conversations": turns} | more


def write_pictures(root: Path, count: int) -> Path:
    folder = root / "data" / "raw" / "img"
    for number in range(count):
        write_picture(folder / f"{number}.png", 4 + number % 20, 5 + number % 13, number)
    return folder


def rejected(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Paths(root).rejected.read_text().splitlines()]


def splits(root: Path) -> list[Split]:
    return [Split.open(Paths(root).prepared, name) for name in ("train", "validation")]


def kept(manifest: DataManifest) -> int:
    return manifest.train.rows + manifest.validation.rows


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
            name = names[int(split.prompt(row)[0]["content"].rpartition(" ")[2].rstrip("?"))]
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


# --- the way there ------------------------------------------------------------------------------


def prepared_files(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Paths(root).prepared.iterdir()}


def test_the_same_bytes_for_any_cut_order_and_place(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [llava(number, image=f"img/{number % 17}.png") for number in range(60)]
    for name, order, size in (("one", rows, 2 << 20), ("two", rows[::-1], 2 << 20), ("cut", rows, 2000)):
        monkeypatch.setattr(parts, "SHARD_BYTES", (size, size))
        write_pictures(tmp_path / name, 17)
        write(tmp_path / name, order)
        prepare_data(settings(model), Paths(tmp_path / name))
    one, two, cut = (prepared_files(tmp_path / name) for name in ("one", "two", "cut"))
    assert sorted(one) == [
        "images.arrow",
        "manifest.json",
        "rejected.jsonl",
        "train.arrow",
        "validation.arrow",
    ]
    assert cut == one
    assert {name for name in one if two[name] != one[name]} == {"manifest.json"}  # the source's fingerprint


IN_WORKERS = (
    "from tasks import prepare_data as stage; from tasks.data import parts; "
    "parts.SHARD_BYTES = (2000, 2000); stage.IN_PLACE_BYTES = 0; stage.main()"
)


def test_several_processes_give_the_same_bytes(tmp_path: Path, model: Path) -> None:
    rows = [llava(number, image=f"img/{number % 17}.png") for number in range(60)]
    for name in ("one", "two"):
        write_pictures(tmp_path / name, 17)
        write(tmp_path / name, rows)
    params = settings(model)
    prepare_data(params, Paths(tmp_path / "one"))
    changes = {"prepare_data": params.prepare_data.model_dump(mode="json"), "model.name_or_path": str(model)}
    tiny.write_params(tmp_path / "two", **changes)
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n    {IN_WORKERS}"]
    env = {**os.environ, "PYTHONPATH": str(tiny.REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path / "two", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert prepared_files(tmp_path / "two") == prepared_files(tmp_path / "one")


def test_another_processor_is_another_content(tmp_path: Path, model: Path) -> None:
    changed = tmp_path / "own"
    shutil.copytree(model, changed)
    said = json.loads((changed / "processor_config.json").read_text())
    said["image_processor"]["image_mean"] = [0.5, 0.5, 0.5]
    (changed / "processor_config.json").write_text(json.dumps(said))
    write_pictures(tmp_path, 9)
    write(tmp_path, [llava(number) for number in range(9)])
    hashes = [prepare_data(settings(base), Paths(tmp_path)).content_hash for base in (model, changed, model)]
    assert hashes[0] == hashes[2] != hashes[1]


def test_pictures_of_rows_behind_max_rows_are_not_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SHARD_BYTES", (2000, 2000))
    write_pictures(tmp_path, 40)
    write(tmp_path, [llava(number) for number in range(40)])
    manifest = prepare_data(settings(model, **{"prepare_data.max_rows": 12}), Paths(tmp_path))
    assert manifest.rows_in == 12 == manifest.pictures


def test_what_was_finished_is_kept_unless_its_pictures_have_changed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts, "SHARD_BYTES", (2000, 2000))
    folder = write_pictures(tmp_path, 40)
    missing = (folder / "3.png").read_bytes()
    (folder / "3.png").unlink()
    write(tmp_path, [llava(number) for number in range(40)])
    strict = settings(model, **{"prepare_data.max_rejected": 0.0})
    with pytest.raises(UserError, match="1 of 40 rows are bad"):
        prepare_data(strict, Paths(tmp_path))
    capfd.readouterr()
    with pytest.raises(UserError, match="1 of 40 rows are bad"):
        prepare_data(strict, Paths(tmp_path))
    said = capfd.readouterr().err
    shards = int(said.partition(" parts were prepared before")[0].rpartition("of ")[2])
    assert shards > 3 and f"{shards} of {shards} parts were prepared before" in said
    (folder / "3.png").write_bytes(missing)
    manifest = prepare_data(strict, Paths(tmp_path))
    assert f"{shards - 1} of {shards} parts were prepared before" in capfd.readouterr().err
    assert kept(manifest) == manifest.pictures == 40


def test_weights_and_packs_count_pictures_as_often_as_rows_show_them(tmp_path: Path, model: Path) -> None:
    write_pictures(tmp_path, 20)
    write(tmp_path, [llava(number) for number in range(20)])
    source = [{"source": "data/raw/rows.json", "format": "auto", "columns": {}, "weight": 2.0}]
    changes = {"prepare_data.source": source, "prepare_data.packing": "best_fit"}
    manifest = prepare_data(settings(model, **changes), Paths(tmp_path))
    assert manifest.pictures == 20 and manifest.balanced
    train = splits(tmp_path)[0]
    assert manifest.train.images == manifest.train.rows == len(train) and manifest.repeated > 0
    assert manifest.train.image_tokens == int(
        sum((train.tokens(row)[0] == IMAGE_ID).sum() for row in range(len(train)))
    )
    assert manifest.packed is not None
    assert manifest.packed.packs < len(train) and manifest.packed.longest <= 512


# --- the album ----------------------------------------------------------------------------------


def test_an_album_of_any_identities_in_any_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros at the end of an identity, first and last ones of a range; more shards than files may be open."""
    monkeypatch.setattr(album, "OPEN_FILES", 3)
    draw = np.random.default_rng(0)
    names = [draw.bytes(16) for _ in range(300)]
    names += [bytes(16), bytes([0] * 15 + [1]), b"\x07" + bytes(15), b"\x07" + b"\xff" * 15, b"\xff" * 16]
    names += [name[:15] + b"\0" for name in names[:20]]
    folders = [tmp_path / str(number) for number in range(20)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        own = album.ShardAlbum(folder, "", None)
        for name in names[number::7]:  # most of them in several shards
            own._add(name, b"bytes of " + name, 1, 2, 3)
        own.close()
    used = np.array(sorted(names[:310:2] + names[300:]), dtype="S16")
    used = np.unique(used)
    files = []
    for held in (1 << 20, 10):
        monkeypatch.setattr(album, "HELD", held)
        album.write_album(folders, used, tmp_path / "images.arrow")
        files.append((tmp_path / "images.arrow").read_bytes())
    assert files[0] == files[1]
    with pa.OSFile(str(tmp_path / "images.arrow")) as source:
        rows = pa.ipc.open_file(source).read_all().to_pylist()
    assert [row["identity"] for row in rows] == [bytes(name).ljust(16, b"\0") for name in used]
    assert all(row["content"] == b"bytes of " + row["identity"] for row in rows)


# --- what goes beside the model -----------------------------------------------------------------


def test_the_base_gets_the_processor_and_the_template_it_brings(tmp_path: Path, model: Path) -> None:
    """llava-hf's repositories have their template in chat_template.json, which no tokenizer reads."""
    changed = tmp_path / "own"
    shutil.copytree(model, changed)
    (changed / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    write_pictures(tmp_path, 9)
    write(tmp_path, [llava(number) for number in range(9)])
    for _ in range(2):  # the second time it is there already
        prepare_data(settings(changed), Paths(tmp_path))
        base = Paths(tmp_path).base
        assert (base / "processor_config.json").read_bytes() == (model / "processor_config.json").read_bytes()
        assert "selectattr" in (base / "chat_template.jinja").read_text()
        split = splits(tmp_path)[0]
        assert split.prompt(0)[0]["content"][0] == {"type": "image"}
        from transformers import AutoTokenizer

        text = AutoTokenizer.from_pretrained(base).apply_chat_template(split.prompt(0), tokenize=False)
        assert text.startswith("<s>USER: <image>\nWhat is in picture ")


def test_a_processor_that_is_missing_is_named(tmp_path: Path, model: Path) -> None:
    changed = tmp_path / "own"
    shutil.copytree(model, changed)
    (changed / "processor_config.json").unlink()
    write_pictures(tmp_path, 3)
    write(tmp_path, [llava(number) for number in range(3)])
    with pytest.raises(UserError, match=r"is a llava_next, and its image processor cannot be loaded"):
        prepare_data(settings(changed), Paths(tmp_path))


def test_looking_at_rows_shows_marks_for_pictures(tmp_path: Path, model: Path) -> None:
    write_pictures(tmp_path, 12)
    write(tmp_path, [llava(number) for number in range(12)])
    params, paths = settings(model), Paths(tmp_path)
    prepare_data(params, paths)
    (sample,) = look(params, paths, "train", [0], 1).samples
    text = "".join(span.text for span in sample.spans)
    (image,) = splits(tmp_path)[0].images(0)
    assert f"USER: [image {image.width}x{image.height}, {image.tokens} tokens]\nWhat" in text
    assert "<image>" not in text
