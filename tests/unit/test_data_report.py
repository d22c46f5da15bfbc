"""What `elastane data` shows as a picture, a table and artifacts: the right numbers, nothing over anything else."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flows.artifacts import fenced
from tasks.commands.data import DataView, Sample, Span, look
from tasks.commands.data_lines import LINES, UNKNOWN, lines_of, shortened
from tasks.commands.data_picture import SHOWN, draw, write_picture
from tasks.commands.data_table import COLUMNS, table
from tasks.contracts import LengthBin, SourceCounts
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.prepare_data import prepare_data
from tasks.register import _log_data
from tests import tiny
from tests.unit.reading import write_lines

CHANGES: dict[str, Any] = {
    "prepare_data.source": [{"source": "data/raw/a.jsonl"}, {"source": "data/raw/b.jsonl"}],
    "prepare_data.on_bad_row": "repair",
    "prepare_data.max_rejected": 0.5,
    "prepare_data.max_length": 90,
    "prepare_data.validation_fraction": 0.3,
    "prepare_data.near_duplicate_threshold": 1.0,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Paths]:
    root = tmp_path_factory.mktemp("report")
    rows = [{"instruction": f"say {n}", "output": f"it is {n} $x_{n}$ " * (1 + n % 5)} for n in range(40)]
    bad = [{"instruction": "say", "output": ""}] * 3 + [{"instruction": "say", "output": 5.5}, rows[0]]
    write_lines(root / "data" / "raw" / "a.jsonl", rows + bad)
    write_lines(root / "data" / "raw" / "b.jsonl", [{"text": f"Text {n}, 你好"} for n in range(20)])
    changes = CHANGES | {"model.name_or_path": str(tiny.write_model(root / "m"))}
    tiny.write_params(root, **changes)
    params = tiny.params(**changes)
    prepare_data(params, Paths(root))
    return params, Paths(root)


@pytest.fixture(scope="module")
def view(workspace: tuple[Any, Paths]) -> DataView:
    return look(*workspace, "train", None, 3)


def test_the_table_holds_the_manifests_numbers(view: DataView) -> None:
    manifest, lines = view.manifest, table(view)
    assert all(tuple(line) == COLUMNS for line in lines)
    parts = {
        part: [line for line in lines if line["part"] == part] for part in {line["part"] for line in lines}
    }
    assert [(line["name"], line["rows"], line["tokens"]) for line in parts["split"]] == [
        ("train", manifest.train.rows, manifest.train.tokens),
        ("validation", manifest.validation.rows, manifest.validation.tokens),
    ]
    kept = manifest.train.rows + manifest.validation.rows
    assert kept == 61 and manifest.rows_in == 65
    for part in ("split", "source", "length"):
        assert sum(line["rows"] for line in parts[part]) == kept
        assert sum(line["share"] for line in parts[part]) == pytest.approx(1)
    assert [line["name"] for line in parts["source"]] == ["data/raw/a.jsonl", "data/raw/b.jsonl"]
    assert {line["name"]: line["rows"] for line in parts["left out"]} == {"no answer": 3, "duplicate": 1}
    worst = parts["left out"][0]
    assert worst["share"] == pytest.approx(3 / 65) and worst["said"].startswith(
        "first at data/raw/a.jsonl: line 41: "
    )
    assert sum(line["rows"] for line in parts["mended"]) == 1


def texts(figure: Any) -> list[Any]:
    return [
        text
        for text in figure.findobj(lambda one: hasattr(one, "get_text"))
        if text.get_text().strip() and text.get_visible()
    ]


def test_the_picture_shows_each_number_and_nothing_over_another(view: DataView) -> None:
    figure = draw(view)
    lengths, sources, left_out, _ = (axes for sub in figure.subfigs for axes in sub.axes)
    bins = view.manifest.length_histogram
    assert [bar.get_height() for bar in lengths.patches] == [one.rows for one in bins]
    assert [label.get_text() for label in lengths.get_xticklabels()] == [str(one.upper) for one in bins]
    assert (
        lengths.get_ylabel() == "rows"
        and f"at most 90; {view.manifest.truncated} were longer" in lengths.get_xlabel()
    )
    assert sorted(bar.get_width() for bar in sources.patches) == sorted(
        one.tokens for one in view.manifest.sources
    )
    assert [bar.get_width() for bar in left_out.patches] == [3, 1]
    said = [text.get_text() for text in left_out.texts]
    assert (
        said == ["3 (4.6%)", "no answer", "1 (1.5%)", "duplicate"]
        and left_out.get_title("left") == "rows left out: 4"
    )
    assert_apart(figure)


def assert_apart(figure: Any) -> None:
    """No text covers another one or leaves the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    shown = [
        text
        for text in texts(figure)
        if text.axes is None or text.axes.axison or text in text.axes.texts or text is text.axes._left_title
    ]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    for (one, a), (other, b) in combinations(boxes, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < 1.5 or down < 1.5, f"{one!r} over {other!r}"
    for text, box in boxes:
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1, text


def test_many_long_names_stay_apart(view: DataView) -> None:
    manifest = view.manifest
    sources = tuple(
        SourceCounts(
            name="folder/" * 12 + f"{n}.jsonl",
            format="chat",
            weight=1,
            rows_in=9,
            train_rows=9,
            validation_rows=0,
            tokens=10**n,
        )
        for n in range(9)
    )
    rejected = {
        f"the chat template refuses it ({'because of that ' * 9}{n})": 10 ** (n % 7) for n in range(9)
    }
    bins = tuple(LengthBin(upper=1 << n, rows=12345 * n) for n in range(4, 18))
    many = manifest.model_copy(
        update={"sources": sources, "rejected": rejected, "length_histogram": bins, "rows_in": 10**7}
    )
    figure = draw(replace(view, manifest=many))
    lengths = figure.subfigs[0].axes[0]
    assert [label.get_text() for label in lengths.get_xticklabels()][-9:-5] == ["512", "1K", "2K", "4K"]
    _, second, third, _ = (axes for sub in figure.subfigs for axes in sub.axes)
    assert len(second.patches) == len(third.patches) == SHOWN
    assert sum(bar.get_width() for bar in second.patches) == sum(one.tokens for one in sources), (
        "nothing lost in others"
    )
    assert_apart(figure)
    empty = manifest.model_copy(update={"sources": (), "rejected": {}, "length_histogram": ()})
    assert "none" in [text.get_text() for text in texts(draw(replace(view, manifest=empty, samples=())))]


def test_learnt_tokens_are_marked_where_they_stand(view: DataView) -> None:
    figure = draw(view)
    below = figure.subfigs[1].axes[0]
    marked = "".join(text.get_text() for text in below.texts if text.get_bbox_patch() is not None)
    learnt = "".join(span.text for sample in view.samples for span in sample.spans if span.learnt)
    assert (
        marked == "".join("" if char == "\n" else char if char not in "你好" else UNKNOWN for char in learnt)
        or "你" in marked
    )
    headings = [text.get_text() for text in below.texts if text.get_fontweight() == "bold"]
    assert headings == [f"train row {s.row}: {s.tokens} tokens, {s.learnt} learnt" for s in view.samples]


def test_long_rows_keep_their_ends_and_narrow_lines_lose_nothing() -> None:
    spans = (Span("a" * 5000, False), Span("b\tü\n" * 30, True), Span("c" * 9000, False), Span("end", True))
    sample = Sample(0, 9, 3, spans)
    short = shortened(sample, 1400)
    assert sum(len(span.text) for span in short.spans) < 1400 + 4 * 60
    assert [span.learnt for span in short.spans] == [False, True, False, True] and short.spans[
        -1
    ].text == "end"
    assert short.spans[0].text == "a" * 175 + " … 4,650 characters … " + "a" * 175
    small = Sample(0, 9, 3, (Span("abc de", False), Span("f\n\ng" + "h" * 12, True)))
    view = DataView(None, "train", (small,), ())  # type: ignore[arg-type]
    lines = [[(run.text, run.learnt) for run in line.runs] for line in lines_of(view, 10)][3:]
    assert lines == [[("abc de", False), ("f", True)], [], [("g" + "h" * 9, True)], [("hhh", True)]]
    tall = DataView(None, "train", (Sample(0, 1, 1, (Span("x\n" * 99, True),)),), ())  # type: ignore[arg-type]
    told = lines_of(tall, 10)
    assert len(told) == 3 + LINES + 1 and "lines more" in told[-1].runs[0].text


def test_a_png_is_written_or_refused(view: DataView, tmp_path: Path) -> None:
    write_picture(view, tmp_path / "data.png")
    with Image.open(tmp_path / "data.png") as picture:
        width, height = picture.size
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert width == 1430 and height > 600
    for colour in ((0x4C, 0x78, 0xA8), (0xD6, 0xF0, 0xDA)):  # bars, and what is behind learnt tokens
        assert (pixels == colour).all(axis=1).sum() > 500
    with pytest.raises(UserError, match=r"--picture .* cannot be written"):
        write_picture(view, tmp_path / "gone" / "data.png")


@pytest.mark.parametrize("text", ["plain", "a ``` fence ```` of ticks", "`"])
def test_rows_in_markdown_end_where_they_end(text: str) -> None:
    block = fenced(Sample(0, 2, 1, (Span(text, False), Span(text, True)))).split("\n")
    assert block[1] == f"{text}⟦{text}⟧" and block[0] == block[2]
    assert set(block[0]) == {"`"} and block[0] not in block[1]


def test_mlflow_keeps_picture_table_and_page(
    workspace: tuple[Any, Paths], view: DataView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through mlflow's own functions into a folder; the real store is tests/pipeline/test_pipeline.py's."""
    import mlflow

    logged: dict[str, Any] = {}
    monkeypatch.setattr(mlflow, "log_figure", lambda figure, name: logged.update({name: figure}))
    monkeypatch.setattr(mlflow, "log_text", lambda text, name: logged.update({name: text}))
    monkeypatch.setattr(
        "tasks.register._log_table", lambda name, columns, rows: logged.update({name: (columns, rows)})
    )
    _log_data(*workspace)
    assert logged.keys() == {"data.png", "data_table.json", "data.html"}
    columns, rows = logged["data_table.json"]
    assert [dict(zip(columns, row, strict=True)) for row in rows] == json.loads(json.dumps(table(view)))
    drawn = io.BytesIO()
    logged["data.png"].savefig(drawn, format="png")
    assert drawn.getvalue().startswith(b"\x89PNG")
    assert "Rows by length" in logged["data.html"] and "color: #008000" in logged["data.html"]
    logged.clear()
    _log_data(workspace[0], Paths(tmp_path))
    assert not logged, "nothing was prepared here"
