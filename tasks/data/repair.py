"""What on_bad_row: repair mends: only what is plain, and never without a word."""

from __future__ import annotations

from tasks.data.pictures import MARK, count_marks
from tasks.data.rows import ESCAPED_BYTE, LONE_SURROGATE
from tasks.data.turns import Turn

REPLACEMENT = "\ufffd"


def mend(turns: list[Turn], chat: bool, images: int) -> tuple[list[Turn], list[str]]:
    """(the turns mended, what was done to them).

    Args:
        chat: turns of a conversation; else the two halves of a completion, or one text.
        images: pictures of the row.
    """
    done: list[str] = []
    for turn in turns:
        _mend_content(turn, done)
    if chat:
        turns = _without_empty(turns, done)
        turns = _joined(turns, done)
        first = next((turn for turn in turns if turn.role == "user"), None)
        if (
            images
            and first
            and isinstance(first.content, str)
            and not count_marks(turn.content for turn in turns)
        ):
            first.content = f"{MARK * images}\n{first.content}"
            done.append("put <image> marks before the first question")
    return turns, done


def _mend_content(turn: Turn, done: list[str]) -> None:
    content = turn.content
    if isinstance(content, int | float) and not isinstance(content, bool):
        turn.content = str(content)
        done.append("wrote a number as text")
    if not isinstance(content, str) or content.isascii():
        return
    # A byte that is not UTF-8 was a letter; which one, only who wrote the file knows.
    if LONE_SURROGATE.search(content) and not ESCAPED_BYTE.search(content):
        turn.content = LONE_SURROGATE.sub(REPLACEMENT, content)
        done.append("replaced half a character")


def _is_empty(turn: Turn) -> bool:
    return isinstance(turn.content, str) and not turn.content.strip() and not turn.calls


def _without_empty(turns: list[Turn], done: list[str]) -> list[Turn]:
    while turns and _is_empty(turns[-1]):
        turns = turns[:-1]
        done.append("dropped an empty last turn")
    if turns and turns[0].role == "system" and _is_empty(turns[0]):
        turns = turns[1:]
        done.append("dropped an empty system turn")
    return turns


def _joined(turns: list[Turn], done: list[str]) -> list[Turn]:
    """Neighbours of one role become one turn; results of tools stay apart, each answers its own call."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        same = last and last.role == turn.role != "tool" and last.learnt == turn.learnt and not last.calls
        if last and same and isinstance(last.content, str) and isinstance(turn.content, str):
            texts = [text for text in (last.content, turn.content) if text.strip()]
            joined[-1] = Turn(turn.role, "\n".join(texts), turn.calls, turn.learnt)
            done.append(f"joined two {turn.role} turns")
        else:
            joined.append(turn)
    return joined
