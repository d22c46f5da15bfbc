"""Tools that a row offers and calls of them, brought to the one form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.data.rows import BadRow, check_writable, quoted

# Keywords of a JSON schema under which null is a value.
NULL_MEANS_NULL = ("default", "const", "examples", "enum")
SHAPE = '[{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}]'
CALL_SHAPE = '{"name": …, "arguments": {…}}'


def tools_text(value: Any) -> str:
    """The JSON list of the tools that a row offers: `value` is that list, or its text, of functions bare or wrapped.

    Nulls that a table put in go; see also `arrow_rows`.

    Raises:
        BadRow: it is no list of functions with names.
    """
    listed = _decoded(value, "tools")
    if isinstance(listed, Mapping):
        listed = [listed]
    if not isinstance(listed, list):
        raise BadRow("tools are no list", f"write them as {SHAPE}", quoted(listed))
    return json_text([_tool(_decoded(tool, "tools")) for tool in listed], "tools") if listed else ""


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        raise BadRow("a tool is no object", f"write tools as {SHAPE}", quoted(tool))
    kind = tool.get("type", "function")
    if kind != "function" and "name" not in tool:  # a tool of the server's own, known by its type
        return _without_nulls(tool)
    function = _decoded(tool.get("function", tool), "tools")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("a tool without a name", f"write tools as {SHAPE}", quoted(tool))
    bare = {key: item for key, item in function.items() if function is not tool or key != "type"}
    if isinstance(bare.get("parameters"), str):
        bare["parameters"] = _decoded(bare["parameters"], "parameters")
    return {"type": "function", "function": _without_nulls(bare)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: item if key in NULL_MEANS_NULL else _without_nulls(item)
            for key, item in value.items()
            if item is not None or key in NULL_MEANS_NULL
        }
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def calls_of(value: Any) -> list[dict[str, Any]]:
    """Calls as templates take them, with arguments as an object, from one call, a list of them, or its text.

    Raises:
        BadRow: a call has no name, or its arguments are no object.
    """
    listed = _decoded(value, "a call")
    return [_call(_decoded(call, "a call")) for call in (listed if isinstance(listed, list) else [listed])]


def _call(call: Any) -> dict[str, Any]:
    function = _decoded(call.get("function", call), "a call") if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow("a tool call without a name", f"write it as {CALL_SHAPE}", quoted(call))
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = _decoded(arguments, "arguments of a tool call")
    arguments = arguments or {}
    if not isinstance(arguments, Mapping):
        raise BadRow("arguments of a tool call are no object", f"write it as {CALL_SHAPE}", quoted(arguments))
    found: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }
    return {"id": call["id"], **found} if isinstance(call.get("id"), str) else found


def json_text(value: Any, what: str) -> str:
    """`value` as JSON that any reader takes.

    Raises:
        BadRow: it holds what JSON has no word for (bytes, times, NaN), or half a character.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{what} that JSON cannot hold", "write it as text", str(error)) from None
    check_writable(what, text)
    return text


def calls_text(calls: list[dict[str, Any]]) -> str:
    return json_text(calls, "a tool call")


def _decoded(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"{what} that is no JSON", "write it with json.dumps", f"{error} in {quoted(value)}"
        ) from None
