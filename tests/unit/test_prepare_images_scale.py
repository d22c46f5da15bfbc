"""prepare_data of rows with images: nothing depends on the way there, and little memory is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.commands.data import look
from tasks.data import album, arrow_rows, parts, shards
from tasks.data.shards import first_rows, read_shard, shards_of
from tasks.data.sources import sources_of
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tests import tiny, tiny_vision
from tests.tiny_vision import IMAGE_ID, PARTS
from tests.unit.picture_rows import kept, llava, settings, splits, write, write_pictures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_vision_model(tmp_path_factory.mktemp("model") / "m")


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


@pytest.mark.slow
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


def test_large_rows_are_held_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_rows, "BYTES_AT_ONCE", 4 << 20)
    monkeypatch.setattr(shards, "FIRST_BYTES", 8 << 20)
    draw = np.random.default_rng(0)
    images = [{"bytes": draw.bytes(1 << 18), "path": None} for _ in range(150)]
    table = pa.table({"text": ["a"] * 150, "image": images})
    del images
    file = tmp_path / "rows.parquet"
    pq.write_table(table, file)
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        (found,) = sources_of(tiny.params(**{"prepare_data.source": name}).prepare_data, tmp_path)
        read = 0
        tracemalloc.start()
        for _ in read_shard(shards_of([found], 1 << 40)[0]):
            read += 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert read == 150 and peak < 10 << 20
        assert 32 <= len(first_rows(found, 1000)) <= 34


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
    folders = [tmp_path / str(number) for number in range(7)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        own = album.ShardAlbum(folder, "", None)
        for name in names[number::3]:  # most of them in several shards
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
        assert split.prompt(0).messages[0]["content"][0] == {"type": "image"}
        from transformers import AutoTokenizer

        text = AutoTokenizer.from_pretrained(base).apply_chat_template(
            split.prompt(0).messages, tokenize=False
        )
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
