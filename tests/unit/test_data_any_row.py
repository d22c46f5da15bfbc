"""Whatever a row is: it is learnt from or refused with a reason that can be written, never a traceback."""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.data.columns import NAMES
from tasks.data.formats import RawRow, canonical
from tasks.data.rows import ROLES, BadRow
from tasks.data.turns import OBVIOUS, REFUSED_OF_TURN, SPEAKERS

EXAMPLES = int(os.environ.get("ELASTANE_EXAMPLES", "300"))  # `make test-all` tries 5,000

texts = st.sampled_from(
    ["", " ", "q", "<image>", "[]", "{}", "[{", '[{"role": "user"}]', "\ud800", "caf\udce9", "é"]
) | st.text(st.characters(), max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=3)
OTHER_KEYS = (
    *("conversations", "image", "functions", "from", "value", "weight", "tool_calls", "function_call"),
    *("tool_call_id", "id", "type", "function", "name", "arguments", "parameters", "bytes", "path"),
)
keys = st.sampled_from([*NAMES, *REFUSED_OF_TURN, *OTHER_KEYS])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)
calls = st.fixed_dictionaries({"name": st.just("f")}, optional={"arguments": values, "id": texts}) | values
turns = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from([*SPEAKERS, *OBVIOUS]) | values,
        "content": texts | values,
        "tool_calls": st.lists(calls, max_size=2),
        "tool_call_id": texts,
        "weight": st.sampled_from([0, 1, None, True]) | values,
    },
)
talks = st.lists(turns | values, max_size=5)
rows = st.dictionaries(keys, values, max_size=5) | st.fixed_dictionaries(
    {"messages": talks},
    optional={"tools": st.lists(calls, max_size=2) | values, "images": values, "system": values},
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(rows | values, st.booleans(), st.sampled_from(["auto", "alpaca", "chat", "completion", "text"]))
def test_any_row_is_learnt_from_or_refused(content: Any, repair: bool, form: Any) -> None:
    before = repr(content)
    try:
        row = canonical(RawRow(content, "f: row 1"), form, {}, repair)
    except BadRow as error:
        assert error.reason and error.fix
        json.dumps(error.line("f: row 1"), ensure_ascii=False).encode()
        str(error).encode()
    else:
        assert row.id and row.group and row.messages
        assert all(role in ROLES and isinstance(text, str) for role, text in row.messages)
        json.dumps(row.chat, ensure_ascii=False).encode()
        (row.tools + "".join(image.place for image in row.images)).encode()
        assert repair or not row.mended
    assert repr(content) == before
