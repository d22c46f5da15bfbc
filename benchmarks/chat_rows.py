"""Chat rows for benchmarks, as many as wanted and always the same: the built-in questions and answers, mutated."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tasks.data.docstrings import docstring_rows

SYSTEMS = (
    "You are a helpful assistant.",
    "You answer questions on Python's standard library, briefly and without guessing.",
    "You are a patient teacher. Say what you do not know, and give an example where it helps.",
)
MOST_ROUNDS, MOST_ANSWERS = 4, 6
MUTATED = 0.15  # share of words replaced by others of the same texts, rare ones as rarely


def write_chat_rows(path: Path, rows: int, seed: int = 0) -> None:
    """JSONL with `messages`: a system turn and one to four rounds, of long-tailed length.

    No two rows are alike, yet their words recur as often as in the texts they come from.
    """
    pairs = [(row.messages[0][1].split(" "), row.messages[1][1].split(" ")) for row in docstring_rows()]
    words = [word for pair in pairs for text in pair for word in text]
    draw = random.Random(seed)

    def mutated(text: list[str]) -> str:
        return " ".join(draw.choice(words) if draw.random() < MUTATED else word for word in text)

    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            messages = [{"role": "system", "content": draw.choice(SYSTEMS)}]
            for _ in range(min(MOST_ROUNDS, 1 + int(draw.expovariate(1.0)))):
                question, answer = draw.choice(pairs)
                more = [
                    draw.choice(pairs)[1] for _ in range(min(MOST_ANSWERS, int(draw.paretovariate(1.2))) - 1)
                ]
                said = " ".join(mutated(part) for part in (answer, *more))
                messages.append({"role": "user", "content": mutated(question)})
                messages.append({"role": "assistant", "content": said})
            file.write(json.dumps({"messages": messages}) + "\n")
