"""What a vision-language base makes of pictures: its image token, and how many of them stand for a picture.

The counts are the base's own processor's. Pixels are not made here.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tasks.data.rows import BadRow
from tasks.errors import UserError

PROCESSOR, PREPROCESSOR, TEMPLATE = "processor_config.json", "preprocessor_config.json", "chat_template.json"
# model_type -> its processor's class, or None where the image processor itself tells the number of patches.
KNOWN: dict[str, str | None] = {
    "llava": "llava.LlavaProcessor",
    "llava_next": "llava_next.LlavaNextProcessor",
    "qwen2_vl": None,
    "qwen2_5_vl": None,
}
# What prompts that are written as text put around an image token.
AROUND = {
    "qwen2_vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>"),
}
# Tokens that stand for other things than text and that no text may hold.
STAND_INS = ("<|video_pad|>",)


@dataclass(frozen=True)
class Vision:
    """`token` is written once for a picture, and becomes as many of `token_id` as `count` says.

    processor: of transformers, with `image_processor`; for the families that have none of their own here it is the
    image processor alone.
    """

    family: str
    token: str
    token_id: int
    processor: Any = field(repr=False)

    @classmethod
    def of(cls, folder: Path, tokenizer: PreTrainedTokenizerBase, name: str) -> Vision | None:
        """That of the base in `folder`; None if it is a language model alone, or of a family that is not known here.

        Args:
            name: what the user calls the model.

        Raises:
            UserError: its processor's files are missing or do not fit its config.
        """
        family = str(_json(folder / "config.json").get("model_type"))
        if family not in KNOWN:
            return None
        from transformers import AutoConfig, AutoImageProcessor  # which bring torch: rows of text go without

        config = AutoConfig.from_pretrained(folder)  # whose file leaves out what is usual
        load: Any = AutoImageProcessor.from_pretrained
        try:
            images = load(folder, backend="pil")
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"model.name_or_path={name} is a {family}, and its image processor cannot be loaded "
                f"({reason.rstrip('.')}); put {PREPROCESSOR} or {PROCESSOR} beside its config.json"
            ) from None
        token_id: Any = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        token = tokenizer.convert_ids_to_tokens(token_id) if isinstance(token_id, int) else None
        if not isinstance(token, str) or tokenizer.encode(token, add_special_tokens=False) != [token_id]:
            raise UserError(
                f"model.name_or_path={name}: the image token {token_id} of its config.json is none of its tokenizer's; "
                "give the tokenizer that belongs to the model"
            )
        return cls(family, token, token_id, _processor(family, folder, config, images, tokenizer))

    @cached_property
    def reserved(self) -> re.Pattern[str]:
        """What no text may hold, since it stands for a picture."""
        words = {self.token, *AROUND.get(self.family, ()), *STAND_INS}
        return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))

    @property
    def mark(self) -> str:
        """What stands for a picture in a prompt that is written as text."""
        before, after = AROUND.get(self.family, ("", ""))
        return f"{before}{self.token}{after}"

    @property
    def image_processor(self) -> Any:
        return getattr(self.processor, "image_processor", self.processor)

    def count(self, width: int, height: int) -> int:
        """Image tokens of a picture of that many pixels.

        Raises:
            BadRow: the model takes none of this shape.
        """
        try:
            if self.processor is self.image_processor:
                patches: int = self.processor.get_number_of_image_patches(height, width, {})
                found = patches // self.processor.merge_size**2
            else:
                found = self.processor._get_num_multimodal_tokens(
                    image_sizes=[(height, width)]
                ).num_image_tokens[0]
        except (ValueError, ZeroDivisionError) as error:
            raise BadRow(
                "an image of a shape that the model does not take",
                "cut it or remove the row",
                f"{width} x {height}: {error}",
            ) from None
        return int(found)


def _processor(
    family: str, folder: Path, config: Any, images: Any, tokenizer: PreTrainedTokenizerBase
) -> Any:
    known = KNOWN[family]
    if known is None:
        return images
    module, name = known.split(".")
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    said = _json(folder / PROCESSOR)
    keys = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")
    given = {key: said[key] for key in keys if said.get(key) is not None}
    if "patch_size" not in given:  # older files leave it to the model's config
        given["patch_size"] = config.vision_config.patch_size
        given["vision_feature_select_strategy"] = config.vision_feature_select_strategy
        # CLIP's towers have a class token, which "default" takes away.
        given["num_additional_image_tokens"] = int(config.vision_config.model_type == "clip_vision_model")
    return kind(images, tokenizer, **given)


def pixels_hash(folder: Path) -> str:
    """Hash of what says how the base in `folder` makes pixels of a picture."""
    files = [file for file in (folder / PREPROCESSOR, folder / PROCESSOR) if file.is_file()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def processors_template(folder: Path) -> str | None:
    """The chat template that a processor brings where its tokenizer has none."""
    for name in (TEMPLATE, PROCESSOR):
        text = _json(folder / name).get("chat_template")
        if isinstance(text, str):
            return text
    return None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is no JSON ({error}); mend the model's files") from None
    return found if isinstance(found, dict) else {}
