"""The built-in rows: questions about Python's standard library, answered by its own docstrings.

Sources are parsed, never imported, so the rows depend on the Python version alone.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.data.rows import Row

# Tests, and what some builds and distributions of the same Python version leave out.
SKIPPED = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "tkinter",
        "turtle",
        "turtledemo",
        "msilib",
        "ensurepip",
        "distutils",
        "windows_events",
        "windows_utils",
    }
)
SHORTEST_WORDS, LONGEST_WORDS = 6, 60
PURPOSE = (
    "What does {name} do in Python?",
    "In Python's standard library, what is {name} for?",
    "Explain {name} in Python briefly.",
)
CALL = (
    "What does {name}({arguments}) do in Python?",
    "What happens when I call {name}({arguments}) in Python?",
)
HOME = (
    'Which Python module has the {kind} {short}, described as "{first}"?',
    'Where in the standard library is {short}? It is the {kind} for this: "{first}"',
)


@dataclass(frozen=True)
class Described:
    """A documented class, function or method of a public module."""

    module: str
    qualified: str
    kind: str
    arguments: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualified}"


def fingerprint() -> str:
    return "python-{}.{}.{}".format(*sys.version_info[:3])


def docstring_rows() -> Iterator[Row]:
    """Rows in a fixed order; rows about the same text share a group."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names:  # site-packages and what a distribution adds
            continue
        if any(part in SKIPPED or (part.startswith("_") and part != "__init__") for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for found in _described(path, module):
            yield from _rows(found)


def _described(path: Path, module: str) -> Iterator[Described]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    yield from _walk(tree.body, module, "")


def _walk(body: list[ast.stmt], module: str, prefix: str) -> Iterator[Described]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        text = _summary(ast.get_docstring(node) or "")
        is_class = isinstance(node, ast.ClassDef)
        if text:
            kind = "class" if is_class else ("method" if prefix else "function")
            arguments = "" if isinstance(node, ast.ClassDef) else _arguments(node)
            yield Described(module, prefix + node.name, kind, arguments, text)
        if isinstance(node, ast.ClassDef):
            yield from _walk(node.body, module, f"{prefix}{node.name}.")


def _arguments(node: ast.FunctionDef) -> str:
    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    return ", ".join(name for name in names if name not in ("self", "cls"))


def _summary(docstring: str) -> str:
    """The first paragraph (and the second, when the first is one short line) as plain running text."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", docstring.strip())]
    if not paragraphs or not paragraphs[0]:
        return ""
    text = paragraphs[0]
    if len(paragraphs) > 1 and len(text.split()) < 12 and re.match(r"[^\W\d_]+(?!:)\b", paragraphs[1]):
        text = f"{text} {paragraphs[1]}"
    if text.endswith(":"):  # it announces a list that is not taken along
        text = ". ".join(text.split(". ")[:-1])
    words = text.split()
    prose = not re.search(r">>>|::|\.\. |^\w+\(.*\)$|--|\|", text)
    if not text or not prose or not SHORTEST_WORDS <= len(words) <= LONGEST_WORDS or not text[0].isupper():
        return ""
    return text if text[-1] in ".!?" else text + "."


def _rows(found: Described) -> Iterator[Row]:
    group = hashlib.sha256(found.text.encode()).hexdigest()
    pick = int(group[:8], 16)
    words = {"name": found.name, "short": found.qualified, "kind": found.kind, "arguments": found.arguments}
    first = re.split(r"(?<=[.!?]) ", found.text)[0]
    where = f"docstring of {found.name}"
    purpose = CALL if found.arguments and pick % 2 else PURPOSE
    yield _row(purpose[pick % len(purpose)].format(**words), found.text, group, where)
    returns = re.search(r"\b[Rr]eturns? (?!.*\b[Rr]eturns? )[^.]+\.", found.text)
    if found.kind != "class" and returns and returns.group(0).strip() != found.text:
        answer = returns.group(0).strip()
        yield _row(f"What does {found.name} return?", f"It {_returns(answer)}", group, where)
    elif pick % 3 == 0:
        answer = f"It is the {found.kind} {found.qualified} in the module {found.module}."
        yield _row(HOME[pick % len(HOME)].format(first=first, **words), answer, group, where)


def _returns(sentence: str) -> str:
    return re.sub(r"^[Rr]eturns? ", "returns ", sentence)


def _row(question: str, answer: str, group: str, where: str) -> Row:
    return Row((("user", question), ("assistant", answer)), group, where)
