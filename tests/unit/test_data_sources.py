"""What params.yaml can name as the source, and what is said where it cannot."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tasks.data.formats import RawRow, canonical, detect
from tasks.data.hub import hub_files
from tasks.data.shards import first_rows, read_shard, shards_of
from tasks.data.sources import fingerprint_of, size_of, sources_of
from tasks.errors import UserError
from tests import tiny
from tests.unit import hub
from tests.unit.reading import contents, raw_rows, source, wheres, write_lines


def rows(*words: str) -> list[dict[str, str]]:
    return [{"text": word} for word in words]


def test_a_folder_gives_all_its_data_in_the_order_of_names_and_says_what_it_leaves(tmp_path: Path) -> None:
    write_lines(tmp_path / "d" / "part-2.jsonl", rows("c"))
    write_lines(tmp_path / "d" / "part-1.jsonl", rows("a", "b"))
    (tmp_path / "d" / "part-3.json.gz").write_bytes(gzip.compress(json.dumps(rows("d")).encode()))
    (tmp_path / "d" / "deep").mkdir()
    (tmp_path / "d" / "deep" / "x.csv").write_text("text\ne\n")
    for name in ("README.md", ".hidden.jsonl", "_SUCCESS", "dataset_info.json", "empty.jsonl"):
        (tmp_path / "d" / name).write_text("" if name == "empty.jsonl" else "[1]")
    found = raw_rows(tmp_path, "d")
    assert [content["text"] for content in contents(found)] == ["e", "a", "b", "c", "d"]
    assert wheres(found)[:2] == ["d/deep/x.csv: line 2", "d/part-1.jsonl: line 1"]
    assert source(tmp_path, "d/").ignored == (
        "d/README.md (no data file)",
        "d/dataset_info.json (no data file)",
        "d/empty.jsonl (empty)",
    )


def test_a_test_split_beside_a_train_split_is_not_trained_on(tmp_path: Path) -> None:
    for name in ("data/train-0.jsonl", "data/train-1.jsonl", "data/test-0.jsonl", "eval/a.jsonl"):
        write_lines(tmp_path / "d" / name, rows(name))
    found = source(tmp_path, "d")
    assert [file.name for file in found.files] == ["d/data/train-0.jsonl", "d/data/train-1.jsonl"]
    assert found.ignored[0] == "d/data/test-0.jsonl (held out beside train)"
    assert [file.name for file in source(tmp_path, "d/eval").files] == ["d/eval/a.jsonl"]  # asked for by name
    shutil.rmtree(tmp_path / "d" / "data")
    assert len(source(tmp_path, "d").files) == 1


def test_a_pattern_names_files_from_the_workspace(tmp_path: Path) -> None:
    for name in ("a/x1.jsonl", "a/x2.jsonl", "b/x3.jsonl", "b/y.jsonl"):
        write_lines(tmp_path / name, rows(name))
    assert wheres(raw_rows(tmp_path, "*/x*.jsonl")) == [
        f"{name}: line 1" for name in ("a/x1.jsonl", "a/x2.jsonl", "b/x3.jsonl")
    ]
    assert len(raw_rows(tmp_path, "**/*.jsonl")) == 4
    assert wheres(raw_rows(tmp_path, f"{tmp_path}/b/*"))[0] == f"{tmp_path}/b/x3.jsonl: line 1"
    write_lines(tmp_path / "odd[1].jsonl", rows("z"))
    assert contents(raw_rows(tmp_path, "odd[1].jsonl")) == rows("z")


def test_any_url_that_fsspec_opens(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    lines = "".join(json.dumps(row) + "\n" for row in rows("a", "b")).encode()
    memory.pipe({"/set/1.jsonl": lines, "/set/2.jsonl.gz": gzip.compress(lines), "/set/LICENSE": b"x"})
    try:
        assert contents(raw_rows(tmp_path, "memory://set/1.jsonl")) == rows("a", "b")
        for name in ("memory://set", "memory://set/*"):
            assert contents(raw_rows(tmp_path, name)) == rows("a", "b", "a", "b")
            assert source(tmp_path, name).ignored == ("memory:///set/LICENSE (no data file)",)
        first = source(tmp_path, "memory://set/1.jsonl")
        assert size_of(first) == len(lines) and not first.paths
        before = fingerprint_of(first)
        memory.pipe({"/set/1.jsonl": lines + lines})
        assert fingerprint_of(first) != before
    finally:
        memory.rm("/set", recursive=True)
    for url, words in (
        ("memory://gone/1.jsonl", r"memory://gone/1\.jsonl is gone"),
        ("nothing://x/1.jsonl", "cannot be opened: Protocol not known: nothing"),
        ("memory://", "holds no data file|is gone"),
    ):
        with pytest.raises(UserError, match=words):
            source(tmp_path, url)


def test_tables_at_a_url(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    memory = fsspec.filesystem("memory")
    table = pa.Table.from_pylist(rows("a", "b"))
    try:
        with memory.open("/t/1.parquet", "wb") as file:
            pq.write_table(table, file)
        with memory.open("/t/2.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            out.write_table(table)
        assert contents(raw_rows(tmp_path, "memory://t")) == rows("a", "b", "a", "b")
    finally:
        memory.rm("/t", recursive=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.json", r"=gone\.json does not exist; give the path of a file .*docstrings"),
        ("gone/deep/file", "does not exist"),
        ("*.jsonl", "matches no file; change the pattern"),
        ("d", r"=d holds no data file .*, but x\.md; give one that does"),
        ("d/x.md", r"ends in \.md; give a file that ends in"),
    ],
)
def test_sources_that_are_none(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.md").write_text("x")
    with pytest.raises(UserError, match=words):
        source(tmp_path, name)


def test_several_sources_each_with_its_own_format_columns_and_weight(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"Q": "q", "A": "a"}])
    write_lines(tmp_path / "b.jsonl", rows("t"))
    listed: list[dict[str, Any]] = [
        {
            "source": "a.jsonl",
            "format": "alpaca",
            "columns": {"instruction": "Q", "output": "A"},
            "weight": 2.5,
        },
        {"source": "b.jsonl"},
    ]
    wanted = tiny.params(
        **{"prepare_data.source": listed, "prepare_data.columns": {"text": "text"}}
    ).prepare_data
    one, two = sources_of(wanted, tmp_path)
    assert (one.name, one.form, one.weight, dict(one.columns)) == (
        "a.jsonl",
        "alpaca",
        2.5,
        listed[0]["columns"],
    )
    assert (two.form, two.weight, dict(two.columns)) == ("auto", 1.0, {"text": "text"})
    shards = shards_of([one, two], 1 << 20)
    assert [shard.source.name for shard in shards] == ["a.jsonl", "b.jsonl"]
    assert shards[0].source.columns == one.columns and shards[0].folder == str(tmp_path)
    assert contents(row for shard in shards for row in read_shard(shard)) == [
        {"Q": "q", "A": "a"},
        {"text": "t"},
    ]


def test_a_mapped_part_that_no_row_has_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", rows("t"))
    with pytest.raises(UserError, match=r"instuction is no part of a row; did you mean instruction\?"):
        source(tmp_path, "a.jsonl", columns={"instuction": "text"})


def test_the_fingerprint_follows_content_and_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "d" / "a.jsonl", rows("a"))
    one = fingerprint_of(source(tmp_path, "d"))
    write_lines(tmp_path / "d" / "b.jsonl", rows("b"))
    two = fingerprint_of(source(tmp_path, "d"))
    write_lines(tmp_path / "d" / "b.jsonl", rows("c"))
    assert len({one, two, fingerprint_of(source(tmp_path, "d"))}) == 3
    assert source(tmp_path, "d").paths == [tmp_path / "d" / "a.jsonl", tmp_path / "d" / "b.jsonl"]


def test_the_built_in_rows_are_a_source_like_others(tmp_path: Path) -> None:
    from tasks.data.docstrings import docstring_rows

    found = source(tmp_path, "docstrings")
    assert detect(first_rows(found, 5), found.name, found.columns, found.form)[0] == "chat"
    (shard,) = shards_of([found], 1)
    raw = [row for row in islice(read_shard(shard), 200) if isinstance(row, RawRow)]
    some = [canonical(row, found.form, found.columns) for row in raw]
    assert some == list(islice(docstring_rows(), 200))
    assert fingerprint_of(found).startswith("python-3") and not found.paths


# --- the hub ------------------------------------------------------------------------------------


def test_a_data_set_is_read_from_its_train_split(tmp_path: Path) -> None:
    """A folder stands for the hub: `datasets` treats both alike."""
    write_lines(tmp_path / "train.jsonl", rows("a"))
    write_lines(tmp_path / "test.jsonl", rows("b"))
    (found,) = hub_files(str(tmp_path))
    assert found[1] == str(tmp_path / "train.jsonl")
    (held_out,) = hub_files(f"{tmp_path}::test")
    assert held_out[1] == str(tmp_path / "test.jsonl")
    with pytest.raises(UserError, match=r"has no split dev, but train, test; write for example .*::train"):
        hub_files(f"{tmp_path}::dev")


def test_a_data_set_that_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"=nobody/nothing is no file here .* give a local \.json"):
        source(tmp_path, "nobody/nothing")
    wanted = tiny.params(**{"prepare_data.source": "nobody/nothing"}).prepare_data
    (unfetched,) = sources_of(wanted, tmp_path, fetch=False)
    assert unfetched.hub and not unfetched.files


READ = """
import sys
from pathlib import Path
from tests.unit.reading import contents, raw_rows, source
from tasks.errors import UserError
for name in sys.argv[1:]:
    try:
        print(contents(raw_rows(Path.cwd(), name)), [file.name for file in source(Path.cwd(), name).files])
    except UserError as error:
        print(error)
"""


def test_a_data_set_is_fetched_from_a_hub_and_read_again_without_it(tmp_path: Path) -> None:
    """The files themselves are read, so the tools of one row do not get the parameters of another's."""
    tools = [{"text": "a", "tools": [{"p": {"x": 1}}]}, {"text": "b", "tools": [{"p": {"y": 1}}]}]
    write_lines(tmp_path / "set" / "train.jsonl", tools)
    write_lines(tmp_path / "set" / "test.jsonl", rows("t"))
    names = [hub.REPOSITORY, f"{hub.REPOSITORY}@main::test", f"{hub.REPOSITORY}::dev"]
    environment = {**os.environ, "PYTHONPATH": str(tiny.REPOSITORY), "HF_HOME": str(tmp_path / "home")}
    environment["ELASTANE_CACHE"] = str(tmp_path / "cache")

    def ran(url: str, offline: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", READ, *names],
            cwd=tmp_path,
            env={**environment, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    with hub.serve("datasets") as server:
        server.push(tmp_path / "set")
        fetched = ran(server.url, "0")
        assert fetched[0] == f"{tools} ['{hub.REPOSITORY}/train.jsonl']"
        assert fetched[1] == f"{rows('t')} ['{hub.REPOSITORY}/test.jsonl']"
        assert "has no split dev, but train, test; write for example owner/model::train" in fetched[2]
    assert ran("http://127.0.0.1:9", "1")[:2] == fetched[:2]
