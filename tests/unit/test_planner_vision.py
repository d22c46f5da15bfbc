"""Image tokens and tiles against transformers' own LLaVA-NeXT functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from tasks.errors import UserError
from tasks.planner.model_spec import model_spec
from tasks.planner.vision import image_tokens
from tests.unit.published_configs import published

NEXT = published("llava-v1.6-vicuna-7b")
WIDE = [[336, 336 * n] for n in range(2, 7)] + [[336 * n, 336] for n in range(2, 7)] + [[672, 672]]
SIZES = [
    (336, 336),
    (672, 672),
    (1008, 336),
    (336, 1008),
    (640, 480),
    (480, 640),
    (1024, 768),
    (1920, 1080),
    (1080, 1920),
    (1, 1),
    (1, 1000),
    (1000, 1),
    (337, 335),
    (2000, 333),
    (333, 2000),
    (100, 700),
    (799, 801),
    (3000, 2000),
    (4032, 3024),
    (57, 41),
    (512, 511),
    (1500, 501),
]


def processors_count(vision, strategy: str, width: int, height: int) -> int:
    """LlavaNextProcessor.replace_image_token's number, without building a tokenizer."""
    stand_in = SimpleNamespace(
        patch_size=vision.patch_size,
        num_additional_image_tokens=1,
        image_processor=SimpleNamespace(image_grid_pinpoints=[list(pair) for pair in vision.grid_pinpoints]),
    )
    stand_in._get_unpadded_features = LlavaNextProcessor._get_unpadded_features.__get__(stand_in)
    size = vision.image_size
    found = LlavaNextProcessor._get_number_of_features(stand_in, height, width, size, size)
    return found - 1 if strategy == "default" else found


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("pinpoints", [NEXT["image_grid_pinpoints"], WIDE], ids=["published", "wide"])
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_any_resolution_as_transformers_counts_it(size, pinpoints, strategy):
    config = {**NEXT, "image_grid_pinpoints": pinpoints, "vision_feature_select_strategy": strategy}
    vision = model_spec(config).vision
    width, height = size
    tokens, tiles = image_tokens(vision, width, height)
    assert tokens == processors_count(vision, strategy, width, height)
    assert tiles == image_size_to_num_patches([height, width], pinpoints, vision.image_size)


def test_published_counts():
    vision = model_spec(NEXT).vision
    # A square image: the 2 x 2 grid whole (48 x 48 and 48 newlines), and the 24 x 24 of the base tile.
    assert image_tokens(vision, 672, 672) == (48 * 48 + 48 + 576, 5)


def test_without_any_resolution_an_image_is_one_tile():
    config = published("llava-1.5-7b")
    assert image_tokens(model_spec(config).vision, 1920, 1080) == (576, 1)
    full = model_spec({**config, "vision_feature_select_strategy": "full"}).vision
    assert image_tokens(full, 10, 10) == (577, 1)


@pytest.mark.parametrize("size", [(0, 5), (5, -1)])
def test_an_image_without_pixels_is_refused(size):
    with pytest.raises(UserError, match=rf"an image of {size[0]}x{size[1]} pixels"):
        image_tokens(model_spec(NEXT).vision, *size)
