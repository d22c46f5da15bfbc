"""`elastane data`: learnt tokens are those of the answers, and every row that was left out is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tasks.commands.data import look
from tasks.commands.data_text import show
from tasks.errors import UserError
from tasks.paths import Paths
from tests import tiny
from tests.unit.test_prepare_data import prepared

ROWS = [{"instruction": f"say {number}", "output": f"it is {number}"} for number in range(20)]


def test_it_shows_what_was_prepared(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "m")
    changes = {"prepare_data.on_bad_row": "reject", "prepare_data.max_rejected": 0.5}
    prepared(tmp_path, model, [*ROWS, {"instruction": "say nothing", "output": ""}], **changes)
    keys = {"model.name_or_path": str(model), "prepare_data.source": "data/raw/rows.json", **changes}
    params, paths = tiny.params(**keys), Paths(tmp_path)
    view = look(params, paths, "train", None, 2)
    assert len(view.samples) == 2 and len(view.rejected) == 1
    for sample in view.samples:
        learnt = "".join(span.text for span in sample.spans if span.learnt)
        read = "".join(span.text for span in sample.spans if not span.learnt)
        assert "it is" in learnt and "say" in read and "say" not in learnt
    told = json.loads(view.to_json())
    assert told["manifest"]["rejected"] == view.manifest.rejected and told["rejected"][0]["fix"]
    console = Console(width=120, record=True)
    show(view, console)
    text = console.export_text()
    assert "Left out: 1 rows" in text and "rows.json: row 21" in text and "it is" in text
    assert look(params, paths, "validation", [0], 0).samples[0].row == 0
    with pytest.raises(UserError, match=r"--row 99 is not in train"):
        look(params, paths, "train", [99], 0)
    with pytest.raises(UserError, match=r"no prepared data yet"):
        look(params, Paths(tmp_path / "empty"), "train", None, 1)
