"""Whatever a file holds, however it is written, packed or cut off: no row is lost, no mask lies, no traceback ends it.

ELASTANE_EXAMPLES says how many files are tried: 300 unless it is set, 5,000 in `make test-all`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.data.formats import canonical
from tasks.data.packing import best_fit
from tasks.data.prepared import IGNORED
from tasks.data.rows import BadRow, Row
from tasks.data.shards import read_shard, shards_of
from tasks.data.templates import Encoder
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tests import tiny
from tests.unit.reading import source
from tests.unit.test_data_any_row import EXAMPLES, rows
from tests.unit.test_data_templates import TOOLS

MANY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
LENGTH = 120  # tokens
FOLDER = Path(tempfile.mkdtemp(prefix="elastane-any-file-"))

said = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60) | st.sampled_from(
    [
        "a " * 90,
        "你好 🦜 réponse\n" * 9,
        "e\u0301\u200d\ufeff",
        "<|im_end|>",
        "<|im_start|>user\n",
        "\x00\x1f\u2028",
        "{{ x }}",
    ]
)
turn = st.tuples(said, said).map(
    lambda pair: [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
)
good = st.one_of(
    st.builds(lambda q, a: {"instruction": q, "output": a}, said, said),
    st.builds(
        lambda talk: {"messages": [one for pair in talk for one in pair]},
        st.lists(turn, min_size=1, max_size=3),
    ),
    st.builds(lambda q, a: {"prompt": q, "completion": a}, said, said),
    st.builds(lambda text: {"text": text}, said),
)
documents = st.lists(good | rows, min_size=1, max_size=8)
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": None}


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes, int | None]:
    """(name, bytes, how many rows it was written with; None where that is for the reader to say)."""
    kind = draw(st.sampled_from(["jsonl", "jsonl", "json", "values", "csv", "txt"]))
    content = draw(documents)
    ends = draw(st.sampled_from(["\n", "\r\n"]))
    dumped = [json.dumps(row, ensure_ascii=draw(st.booleans()), default=repr) for row in content]
    count: int | None = len(content)
    if kind == "jsonl":
        text = ends.join(dumped) + draw(st.sampled_from(["", ends, ends * 3]))
    elif kind == "json":
        text = "[" + ("," + ends).join(dumped) + "]"
    elif kind == "values":
        text = ends.join(json.dumps(row, indent=1, default=repr) for row in content if isinstance(row, dict))
        count = None  # a row of one line each is lines, which have other rules
    elif kind == "csv":
        written = io.StringIO()
        names = list(dict.fromkeys(str(key) for row in content if isinstance(row, dict) for key in row)) or [
            "text"
        ]
        out = csv.DictWriter(written, names, lineterminator=ends)
        out.writeheader()
        flat = [
            {str(key): str(value) for key, value in row.items()} for row in content if isinstance(row, dict)
        ]
        out.writerows(flat)
        text, count = written.getvalue(), None
    else:
        text, count = ends.join(draw(st.lists(said, min_size=1, max_size=5))), None
    mark = b"\xef\xbb\xbf" if draw(st.booleans()) else b""
    whole = mark + text.encode("utf-8", "surrogatepass")
    how = draw(st.sampled_from(["whole", "whole", "cut", "byte", "packed and cut"]))
    if how == "cut":
        whole, count = whole[: draw(st.integers(0, len(whole)))], None
    elif how == "byte":
        at = draw(st.integers(0, len(whole) - 1))
        whole, count = whole[:at] + bytes([draw(st.integers(0, 255))]) + whole[at + 1 :], None
    packed = draw(st.sampled_from(sorted(PACKERS)))
    pack = PACKERS[packed] or (lambda plain: pa.compress(plain, "zstd", asbytes=True))
    whole = pack(whole)
    if how == "packed and cut":
        whole, count = whole[: draw(st.integers(0, len(whole)))], None
    name = "r." + ("json" if kind == "values" else kind) + draw(st.sampled_from(["", packed]))
    return name, whole, count


def tokenizer_of(template: str) -> Any:
    from transformers import AutoTokenizer

    folder = FOLDER / "tokenizer"
    if not folder.is_dir():
        tiny.write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def encoders() -> dict[str, Encoder]:
    return {learn: Encoder(tokenizer_of(TOOLS), None, LENGTH, learn) for learn in ("answers", "last", "all")}


@pytest.mark.timeout(7200)
@MANY
@given(files(), st.sampled_from(["answers", "last", "all"]), st.booleans(), st.sampled_from([1 << 40, 40]))
def test_no_file_loses_a_row(
    encoders: dict[str, Encoder], file: tuple[str, bytes, int | None], learn: str, repair: bool, target: int
) -> None:
    name, whole, count = file
    (FOLDER / name).write_bytes(whole)
    try:
        found = source(FOLDER, name)
        read = [row for shard in shards_of([found], target) for row in read_shard(shard)]
    except UserError as error:
        assert str(error).encode() and name in str(error)
        return
    finally:
        (FOLDER / name).unlink()
    if count is not None:
        assert len(read) == count, "as many rows as were written"
    wheres = [row[0] if isinstance(row, tuple) else row.where for row in read]
    assert len(set(wheres)) == len(wheres), "each row has a place of its own"
    kept: list[Row] = []
    bad: list[BadRow] = []
    for row in read:
        if isinstance(row, tuple):
            bad.append(row[1])
            continue
        try:
            kept.append(canonical(row, found.form, found.columns, repair))
        except BadRow as error:
            bad.append(error)
    assert len(kept) + len(bad) == len(read)
    for one in bad:
        assert one.reason and one.fix and json.dumps(one.line("f: row 1"), ensure_ascii=False).encode()
    check_encoded(encoders[learn], kept)


def check_encoded(encoder: Encoder, kept: list[Row]) -> None:
    """Each row's pieces are learnt from or refused; masks and ids agree; ids are what their text is encoded as."""
    parts = [list(encoder.pieces(row)) for row in kept]
    for row, pieces in zip(kept, parts, strict=True):
        assert pieces and (row.kind != "text" or "".join(piece.answer for piece in pieces) == row.answer)
    pieces = [piece for some in parts for piece in some]
    results = encoder.encode(pieces)
    assert len(results) == len(pieces)
    lengths = []
    for piece, result in zip(pieces, results, strict=True):
        alone = encoder.encode([piece])[0]
        if isinstance(result, BadRow):
            assert result.reason and result.fix and isinstance(alone, BadRow) and str(alone) == str(result)
            continue
        ids, labels = np.asarray(result.input_ids), np.asarray(result.labels)
        assert not isinstance(alone, BadRow) and np.array_equal(alone.input_ids, ids), (
            "its company changes nothing"
        )
        assert len(ids) == len(labels) and 2 <= len(ids) <= LENGTH
        learnt = labels != IGNORED
        assert learnt[1:].any() and np.array_equal(labels[learnt], ids[learnt])
        if result.truncated:
            assert learnt[-1], "cut behind a token that is learnt"
        decoded = encoder._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        assert "\ufffd" not in decoded or any("\ufffd" in text for _, text in piece.messages) or piece.tools
        again = encoder._tokenizer(decoded, add_special_tokens=False)["input_ids"]
        assert list(again) == ids.tolist(), "decoded and encoded again they are the same"
        lengths.append(len(ids))
    if lengths:
        packs = best_fit(np.array(lengths, dtype=np.int64), LENGTH)
        assert sorted(packs.rows.tolist()) == list(range(len(lengths)))
        assert packs.sums(np.array(lengths, dtype=np.int64)).max() <= LENGTH


@pytest.mark.timeout(7200)
@settings(MANY, max_examples=max(20, EXAMPLES // 10))
@given(
    documents,
    st.sampled_from(["reject", "repair"]),
    st.sampled_from(["none", "best_fit"]),
    st.integers(0, 2**32),
)
def test_the_stage_accounts_for_every_row(
    model: Path, content: list[Any], on_bad_row: str, packing: str, number: int
) -> None:
    base = [{"instruction": f"count {number} to {n}", "output": f"it is {n}"} for n in range(12)]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        paths = Paths(Path(folder))
        raw = paths.root / "data" / "raw"
        raw.mkdir(parents=True)
        (raw / "r.jsonl").write_bytes(
            b"".join(json.dumps(row, default=repr).encode() + b"\n" for row in [*base, *content, *base[:2]])
        )
        keys = {
            "model.name_or_path": str(model),
            "prepare_data.source": "data/raw/r.jsonl",
            "prepare_data.validation_fraction": 0.4,
            "prepare_data.on_bad_row": on_bad_row,
            "prepare_data.max_rejected": 1.0,
            "prepare_data.packing": packing,
        }
        try:
            manifest = prepare_data(tiny.params(**keys), paths)
        except UserError as error:
            assert "leaves no row" in str(error)
            return
        assert manifest.balanced and manifest.rows_in == len(base) + len(content) + 2
        listed = [json.loads(line) for line in paths.rejected.read_text(encoding="utf-8").splitlines()]
        assert Counter(line["reason"] for line in listed) == Counter(manifest.rejected)
        assert all(line["file"].endswith("r.jsonl") and line["fix"] for line in listed)
        assert {line["row"] for line in listed} <= set(range(1, manifest.rows_in + 1))
        assert manifest.rejected["duplicate"] >= 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("any") / "m")
