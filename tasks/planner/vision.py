"""The vision tower in front of a decoder, and how many tokens an image becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.contracts import VisionSpec
from tasks.errors import UserError
from tasks.planner.config_values import ConfigValues


@dataclass(frozen=True)
class VisionFamily:
    """A vision-language model_type: whether images of any resolution are cut into tiles."""

    any_resolution: bool


VISION_FAMILIES = {"llava": VisionFamily(False), "llava_next": VisionFamily(True)}

# What LlavaConfig and LlavaNextConfig take where vision_config is left out: CLIP's ViT-L/14 for 336 pixels.
VIT_LARGE: dict[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
GRID_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # LlavaNextConfig's


def vision_spec(config: ConfigValues, hidden: int) -> VisionSpec:
    """The CLIP tower and the two-layer projector of a LLaVA config.

    Args:
        hidden: width of the decoder.

    Raises:
        UserError: a tower that is no CLIP model, or a value that is none.
    """
    tower = config.section("vision_config")
    if config.get("vision_config") is None:
        tower = tower.changed(**VIT_LARGE)
    if tower.get("model_type") not in (None, "clip_vision_model"):
        raise UserError(
            f"config.json: {tower.name('model_type')}={tower.get('model_type')!r} cannot be planned; "
            "set model.name_or_path to a model whose tower is a clip_vision_model"
        )
    width, ffn = tower.size("hidden_size", 768), tower.size("intermediate_size", 3072)
    layers, image = tower.size("num_hidden_layers", 12), tower.size("image_size", 224)
    patch, channels = tower.size("patch_size", 32), tower.size("num_channels", 3)
    if image < patch:
        raise UserError(
            f"config.json: {tower.name('image_size')}={image} is less than one patch of {patch} pixels; mend it"
        )
    taken = _feature_layers(config, layers)
    positions = (image // patch) ** 2 + 1
    any_resolution = VISION_FAMILIES[str(config.get("model_type"))].any_resolution
    return VisionSpec(
        layers=layers,
        feature_layers=max(taken),
        hidden=width,
        ffn=ffn,
        heads=tower.size("num_attention_heads", 12),
        image_size=image,
        patch_size=patch,
        patches=positions,
        tile_tokens=positions - 1 if _drops_class_token(config) else positions,
        grid_pinpoints=_grid_pinpoints(config) if any_resolution else (),
        tower_parameters=_tower(width, ffn, layers, patch * patch * channels, positions),
        projector_parameters=_projector(config, width * len(taken), hidden, any_resolution),
    )


def image_tokens(vision: VisionSpec, width: int, height: int) -> tuple[int, int]:
    """Tokens an image of so many pixels takes in the decoder, and tiles it takes in the tower.

    LLaVA-NeXT (any resolution, as transformers' LlavaNextProcessor counts it): the image is scaled into the grid
    that keeps most of it, cut into tiles, and seen once more as a whole in one tile. Of the grid's patches those
    that are only padding are dropped, and a newline token ends every row. Other models see one tile.

    Raises:
        UserError: an image without pixels.
    """
    if width < 1 or height < 1:
        raise UserError(
            f"an image of {width}x{height} pixels has nothing to see; take its row out of the data"
        )
    if not vision.grid_pinpoints:
        return vision.tile_tokens, 1
    grid_height, grid_width = _best_grid(vision.grid_pinpoints, width, height)
    side = vision.image_size // vision.patch_size
    rows, columns = side * (grid_height // vision.image_size), side * (grid_width // vision.image_size)
    if width / height > columns / rows:
        seen = int(round(height * (columns / width), 7))
        rows -= (rows - seen) // 2 * 2
    else:
        seen = int(round(width * (rows / height), 7))
        columns -= (columns - seen) // 2 * 2
    tiles = -(-grid_height // vision.image_size) * -(-grid_width // vision.image_size)
    return rows * columns + rows + vision.tile_tokens, tiles + 1


def _best_grid(grids: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """The (height, width) that keeps most of the image's pixels, and of those the one that wastes fewest."""

    def fit(grid: tuple[int, int]) -> tuple[int, int]:
        grid_height, grid_width = grid
        scale = min(grid_width / width, grid_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid_height * grid_width

    return max(grids, key=fit)


def _tower(width: int, ffn: int, layers: int, patch_values: int, positions: int) -> int:
    """A CLIP vision transformer: patch embedding without bias, class token, positions, a norm before and after."""
    attention = 4 * (width * width + width)
    mlp = 2 * width * ffn + ffn + width
    norm = 2 * width
    return (patch_values + 1 + positions) * width + layers * (attention + mlp + 2 * norm) + 2 * norm


def _projector(config: ConfigValues, features: int, hidden: int, newline: bool) -> int:
    """Two linears, and the learned newline token of any-resolution models."""
    bias = 2 * hidden if config.flag("multimodal_projector_bias", True) else 0
    return features * hidden + hidden * hidden + bias + (hidden if newline else 0)


def _drops_class_token(config: ConfigValues) -> bool:
    strategy = config.get("vision_feature_select_strategy")
    if strategy not in (None, "default", "full"):
        raise UserError(
            f"config.json: vision_feature_select_strategy={strategy!r} must be default or full; mend the model's config"
        )
    return strategy != "full"


def _feature_layers(config: ConfigValues, layers: int) -> list[int]:
    """How many layers have run before each feature that the projector reads; negative ones count from the end."""
    value = config.get("vision_feature_layer")
    wanted: list[object] = [-2] if value is None else value if isinstance(value, list) else [value]
    taken = [
        layer % (layers + 1)
        for layer in wanted
        if isinstance(layer, int) and not isinstance(layer, bool) and -layers - 1 <= layer <= layers
    ]
    if not wanted or len(taken) < len(wanted):
        raise UserError(
            f"config.json: vision_feature_layer={value!r} must be one or several of the tower's {layers} layers; "
            "mend the model's config"
        )
    return taken


def _grid_pinpoints(config: ConfigValues) -> tuple[tuple[int, int], ...]:
    value = config.get("image_grid_pinpoints")
    if value is None:
        return GRID_PINPOINTS
    if not isinstance(value, list) or not value or not all(_is_size(pair) for pair in value):
        raise UserError(
            f"config.json: image_grid_pinpoints={value!r} must be a list of [height, width] in pixels; "
            "mend the model's config"
        )
    return tuple((height, width) for height, width in value)


def _is_size(pair: object) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in pair)
    )
