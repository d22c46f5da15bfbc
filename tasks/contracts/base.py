"""What every noun is: frozen, closed, JSON in and out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.errors import UserError

# float64 is for proofs alone: no recipe may ask for it.
Precision = Literal["float32", "bfloat16", "float16", "float64"]
FinetuningType = Literal["lora", "qlora", "full"]
METHOD_NAMES: dict[FinetuningType, str] = {"lora": "LoRA", "qlora": "QLoRA", "full": "full tuning"}
Degree = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class Contract(BaseModel):
    """Base of all nouns: immutable, unknown keys are errors, files are written whole or not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads JSON.

        Raises:
            UserError: the file is missing or does not hold this contract.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing, and this step reads it; run the earlier stages first (`elastane run`)"
            ) from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise UserError(
                f"{path} does not hold a {cls.__name__} of this version of elastane "
                f"({error.errors()[0]['msg']}); delete it and run `elastane run`"
            ) from None

    def to_json(self) -> str:
        """Canonical text: the same contract always gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """Writes the file at once: a reader sees the old content or the new, never a part."""
        write_text(path, self.to_json())


def write_text(path: Path, text: str) -> None:
    """Replaces `path` atomically (never through a hard link that a DVC cache shares)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
