"""JSON values out of a stream, one at a time: a list of rows of any length in little memory.

The standard library decodes; this only feeds it. So a row in a list reads exactly like the same row on a line of a
.jsonl file: NaN and Infinity are numbers, of a key that is written twice the last value counts, integers have any
length.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, BinaryIO

from tasks.errors import UserError

CHUNK = 1 << 20
BLANK = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()
# Python refuses integers of more than 4300 digits; such a number is no text either way, but the row may not need it.
ANY_LENGTH = json.JSONDecoder(parse_int=Decimal)
# An error this near to the end of what was read may be no more than the end.
LONGEST_TOKEN = 16


def decode(text: str) -> Any:
    """The one value that `text` holds.

    Raises:
        json.JSONDecodeError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return ANY_LENGTH.decode(text)


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """(the value that begins at `start`, where it ends). Raises as `decode` does."""
    try:
        return DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return ANY_LENGTH.raw_decode(text, start)


class JsonValues:
    """Iterates over the values of a JSON list, or over values that follow each other without one.

    Bytes that are not UTF-8 become lone surrogates, so that only the row that holds them is bad.

    Args:
        stream: the file, at its beginning, or at a value if `inside`.
        name: of the file, for errors.
        inside: the stream begins within a list (and may end within it).
        stop: read no further than so many bytes.
        listed: values stand in a list, separated by commas.
    """

    def __init__(
        self, stream: BinaryIO, name: str, inside: bool = False, stop: int | None = None, listed: bool = True
    ) -> None:
        self._stream, self._name, self._inside, self._listed = stream, name, inside, listed
        self._left, self._part = stop, inside or stop is not None
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._ended = "", 0, False
        self._bytes, self._lines = 0, 0  # before self._text
        self.row = 0

    @property
    def offset(self) -> int:
        """Bytes of the stream that were used so far."""
        return self._bytes + len(self._text[: self._at].encode("utf-8", "surrogateescape"))

    def reached(self, offset: int) -> bool:
        """Whether certainly `offset` bytes were used; cheaper than to ask for `offset`, since a character may have
        more bytes than one.
        """
        return self._bytes + self._at >= offset

    def __iter__(self) -> Iterator[Any]:
        if not self._inside:
            self._begin()
        while self._peek() not in ("", "]"):
            self.row += 1
            value = self._value()
            if self._listed:
                self._comma()
            yield value
        if not self._part:
            self._end()

    def _begin(self) -> None:
        if self._peek() == "\ufeff":
            self._at += 1
        if self._listed:
            if self._peek() != "[":
                raise UserError(f"{self._name} is no JSON list; put its rows in [ ]")
            self._at += 1

    def _comma(self) -> None:
        after = self._peek()
        if after == ",":
            self._at += 1
            if self._peek() == "]":
                raise self._wrong("a comma with no row behind it", self._at)
        elif after not in ("", "]"):
            raise self._wrong("no comma between two rows", self._at)

    def _end(self) -> None:
        if self._listed and self._peek() != "]":
            raise UserError(
                f"{self._name} breaks off after row {self.row}: the list never ends; fetch it again or close it with ]"
            )
        self._at += self._listed
        if self._peek():
            raise self._wrong("text behind the end of the list", self._at)

    def _peek(self) -> str:
        """The next character that is no blank; "" at the end."""
        while True:
            blank = BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read(CHUNK)

    def _value(self) -> Any:
        while True:
            try:
                value, end = decode_at(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_go_on(error):
                    raise self._wrong(error.msg, error.pos) from None
            except RecursionError:
                raise self._wrong("it is nested too deeply", self._at) from None
            else:
                # A number at the end of what was read may have more digits.
                if end < len(self._text) or self._text[end - 1] in '}]"' or self._ended:
                    self._at = end
                    return value
            # Doubling keeps the work in proportion to the row's length.
            self._read(max(CHUNK, len(self._text) - self._at))

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - LONGEST_TOKEN

    def _read(self, size: int) -> None:
        used = self._text[: self._at]
        self._bytes += len(used.encode("utf-8", "surrogateescape"))
        self._lines += used.count("\n")
        wanted = size if self._left is None else min(size, self._left)
        fresh = self._stream.read(wanted) if wanted else b""
        if self._left is not None:
            self._left -= len(fresh)
        self._ended = not fresh
        self._text = self._text[self._at :] + self._decoder.decode(fresh, final=self._ended)
        self._at = 0

    def _wrong(self, what: str, at: int) -> UserError:
        where = (
            f"row {self.row}" if self._inside else f"line {self._lines + self._text[:at].count(chr(10)) + 1}"
        )
        return UserError(
            f"{self._name} is not valid JSON at {where} ({what}); mend it, or name it .jsonl if it holds a row a line"
        )
