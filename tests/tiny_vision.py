"""A vision-language model and pictures small enough for a CPU test, made from nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

IMAGE, IMAGE_ID = "<image>", 259
TILE, PATCH = 8, 4
PINPOINTS = [[8, 16], [16, 8], [16, 16], [24, 8], [8, 24]]
# That of llava-hf's repositories: it takes turns in parts, and puts a turn's images before its text.
PARTS = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


def write_vision_tokenizer(folder: Path, template: str | None = None, image: str = IMAGE, *more: str) -> Any:
    """One token a byte, <s> and </s>, and behind them the image token (and `more`); a template only if it is given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    byte_level = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(alphabet)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=[image, *more],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_processor(folder: Path, family: str = "llava_next") -> Any:
    """Its processor in `folder`, which holds the tokenizer already."""
    from transformers import AutoTokenizer
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes: dict[str, Any] = {
        "size": {"shortest_edge": TILE},
        "crop_size": {"height": TILE, "width": TILE},
    }
    said = {
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    processor: Any
    if family == "llava_next":
        images = LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=PINPOINTS)
        processor = LlavaNextProcessor(images, tokenizer, **said)
    else:
        processor = LlavaProcessor(LlavaImageProcessorPil(**sizes), tokenizer, **said)
    processor.save_pretrained(folder)
    return processor


def write_vision_model(
    folder: Path, family: str = "llava_next", template: str | None = None, hidden: int = 16, seed: int = 0
) -> Path:
    """A random LLaVA-NeXT (or LLaVA) over a tiny CLIP tower and Llama, with tokenizer and processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_vision_tokenizer(folder, template)
    write_processor(folder, family)
    torch.manual_seed(seed)
    tower = CLIPVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=TILE,
        patch_size=PATCH,
        projection_dim=hidden,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    more = {"image_grid_pinpoints": PINPOINTS} if family == "llava_next" else {}
    config = AutoConfig.for_model(
        family,
        vision_config=tower.to_dict(),
        text_config=text.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        **more,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Noise, so that pictures of another seed are other pictures."""
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, kind, **more)
    return written.getvalue()


def write_picture(path: Path, width: int = 10, height: int = 6, seed: int = 0, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "JPEG" if path.suffix in (".jpg", ".jpeg") else "PNG"
    path.write_bytes(file_of(picture(width, height, seed), kind, **more))
    return path
