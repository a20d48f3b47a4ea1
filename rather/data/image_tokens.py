"""How many tokens an image becomes, and which: the arithmetic of transformers' processors.

The tokenising processes import neither torch nor transformers, and a prompt needs no pixels, only
their number. Tests compare every family with its processor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rather.arithmetic import ceil_div
from rather.data.images import (
    MOST_IMAGES,
    MOST_PIXELS_OF_A_ROW,
    bad_image,
    open_image,
    read_image,
)
from rather.errors import DataError
from rather.files import parse_json, read_object, text_sha

Json = dict[str, Any]
Grid = tuple[int, ...]
QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
FAMILIES = (*QWEN, "llava_next", "smolvlm")
SETTINGS = (  # of an image processor of transformers
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor",
    "do_normalize", "image_mean", "image_std", "do_pad", "patch_size", "temporal_patch_size",
    "merge_size", "image_grid_pinpoints", "do_image_splitting", "max_image_size",
)  # fmt: skip
LARGEST_SIDE = 4096  # to which smolvlm scales before it cuts an image into tiles
KEPT = 64  # images whose facts are remembered: pairs of one row share theirs


class ImageFacts(NamedTuple):
    """What the tokens of a prompt depend on; `path` is empty for an image inside its row."""

    digest: str  # of content and processor settings
    path: str
    grid: Grid
    tokens: int


@dataclass(frozen=True)
class ImageRecipe:
    """Everything that decides how an image becomes pixels and tokens, as plain values."""

    family: str
    token: int  # the id that stands for each feature of an image
    processor: Json  # settings of transformers' image processor
    counts: Json = field(default_factory=dict)  # further numbers of the family's processor

    @cached_property
    def digest(self) -> str:
        return text_sha(json.dumps([self.family, self.processor, self.counts], sort_keys=True))

    def image_digest(self, content: bytes) -> str:
        """Return the identity of an image: the same content gives the same pixels."""
        from hashlib import sha256

        return sha256(self.digest.encode() + content).hexdigest()[:32]

    def grid(self, height: int, width: int) -> Grid:
        """Return what the processor reports for an image of this size."""
        if self.family in QWEN:
            return (1, *_qwen_grid(height, width, self.processor))
        if self.family == "llava_next":
            return height, width
        return _smolvlm_grid(height, width, self.processor)

    def tokens(self, grid: Grid) -> int:
        """Return how many features an image has."""
        if self.family in QWEN:
            return math.prod(grid) // int(self.processor["merge_size"]) ** 2
        if self.family == "llava_next":
            return _llava_tokens(grid[0], grid[1], self.processor, self.counts)
        return int(self.counts["image_seq_len"]) * (math.prod(grid) + 1)

    def written(self, grid: Grid, token: str) -> str:
        """Return the text that stands for an image; `token` is that of one feature."""
        if self.family != "smolvlm":
            return token * self.tokens(grid)
        features = token * int(self.counts["image_seq_len"])
        text = ""
        rows, columns = grid
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"<fake_token_around_image><row_{row}_col_{column}>{features}"
            text += "\n"
        start = "\n" if rows else ""
        around = "<fake_token_around_image>"
        return f"{text}{start}{around}<global-img>{features}{around}"


class ImageReader:
    """Opens images and computes their facts; remembers the last ones."""

    def __init__(self, recipe: ImageRecipe) -> None:
        self.recipe = recipe
        self._facts: dict[tuple[str, str], tuple[ImageFacts, int]] = {}

    def facts(self, references: Sequence[str], folder: str) -> tuple[ImageFacts, ...]:
        """Return the facts of the images of a row; raise DropReason if one cannot be used."""
        if len(references) > MOST_IMAGES:
            raise bad_image(f"{len(references)} images in a row; at most {MOST_IMAGES} are read")
        images: list[ImageFacts] = []
        total = 0
        for reference in references:
            facts, pixels = self._one(reference, folder)
            total += pixels
            if total > MOST_PIXELS_OF_A_ROW:
                most = f"{MOST_PIXELS_OF_A_ROW:,}"
                raise bad_image(f"the images of a row have more than {most} pixels")
            images.append(facts)
        return tuple(images)

    def _one(self, reference: str, folder: str) -> tuple[ImageFacts, int]:
        key = (folder, reference)
        if key not in self._facts:
            path, content = read_image(reference, folder)
            width, height = open_image(content).size
            recipe = self.recipe
            grid = recipe.grid(height, width)
            facts = ImageFacts(recipe.image_digest(content), path, grid, recipe.tokens(grid))
            if len(self._facts) >= KEPT:
                self._facts.pop(next(iter(self._facts)))
            self._facts[key] = facts, width * height
        return self._facts[key]


# ---- the arithmetic of each family


def _qwen_grid(height: int, width: int, settings: Json) -> tuple[int, int]:
    """Return the patches of an image whose sides become multiples of a merged patch."""
    patch = int(settings["patch_size"])
    factor = patch * int(settings["merge_size"])
    least = int(settings["size"]["shortest_edge"])
    most = int(settings["size"]["longest_edge"])
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > most:
        scale = math.sqrt((height * width) / most)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < least:
        scale = math.sqrt(least / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height // patch, new_width // patch


def _best_resolution(height: int, width: int, resolutions: Sequence[Sequence[int]]) -> Grid:
    """Return the resolution that keeps most of an image, and of those the smallest."""

    def kept_and_wasted(resolution: Sequence[int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    best = max(resolutions, key=kept_and_wasted)
    return best[0], best[1]


def _llava_tokens(height: int, width: int, settings: Json, counts: Json) -> int:
    """Return the features of the whole image and of its tiles, without padding, with line ends."""
    side = int(settings["crop_size"]["height"])
    best_height, best_width = _best_resolution(height, width, settings["image_grid_pinpoints"])
    patches = side // int(counts["patch_size"])
    rows = patches * (best_height // side)
    columns = patches * (best_width // side)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    whole_image = patches * patches + int(counts["num_additional_image_tokens"])
    if counts["vision_feature_select_strategy"] == "default":
        whole_image -= 1
    return rows * columns + rows + whole_image


def _smolvlm_grid(height: int, width: int, settings: Json) -> Grid:
    """Return the rows and columns of tiles; (0, 0) if the image is one tile."""
    if not settings["do_image_splitting"]:
        return 0, 0
    ratio = width / height
    tile = int(settings["max_image_size"]["longest_edge"])
    longest = int(settings["size"]["longest_edge"])
    if width >= height:
        width, height = longest, _even(int(longest / ratio))
    else:
        height, width = longest, _even(int(longest * ratio))
    width, height = _below_largest_side(max(width, 1), max(height, 1))
    ratio = width / height
    if width >= height:
        width = ceil_div(width, tile) * tile
        height = ceil_div(int(width / ratio), tile) * tile
    else:
        height = ceil_div(height, tile) * tile
        width = ceil_div(int(height * ratio), tile) * tile
    return (height // tile, width // tile) if max(height, width) > tile else (0, 0)


def _even(side: int) -> int:
    return side + side % 2


def _below_largest_side(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > LARGEST_SIDE:
        return LARGEST_SIDE, max(int(LARGEST_SIDE / ratio), 1)
    if height > width and height > LARGEST_SIDE:
        return max(int(LARGEST_SIDE * ratio), 1), LARGEST_SIDE
    return width, height


# ---- the files of a checkpoint

DEFAULTS: dict[str, Json] = {  # of the classes in transformers, where a file is silent
    "qwen": {
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    },
    "llava_next": {
        "size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224},
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "smolvlm": {
        "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
    },
}  # fmt: skip


def family_of(folder: Path | None) -> str | None:
    """Return the model type of a checkpoint with a vision tower; None for a language model."""
    config = _read(folder / "config.json") if folder else {}
    return str(config.get("model_type")) if "vision_config" in config else None


def image_recipe(
    folder: Path, most_pixels: int | None = None, least_pixels: int | None = None
) -> ImageRecipe:
    """Return the recipe of a checkpoint of one of FAMILIES; raise DataError if it has none."""
    config = _read(folder / "config.json")
    family = str(config.get("model_type"))
    whole = _read(folder / "processor_config.json")
    written = whole.get("image_processor") or _read(folder / "preprocessor_config.json")
    if not written:
        raise DataError(
            f"{folder}: has no preprocessor_config.json or processor_config.json, which say how "
            "images are read; copy them from the model's source."
        )
    settings = {name: written[name] for name in SETTINGS if written.get(name) is not None}
    processor = DEFAULTS["qwen" if family in QWEN else family] | settings
    if not processor.get("do_resize", True):
        raise DataError(f"{folder}: its processor does not resize images (do_resize: false).")
    if family in QWEN:
        processor["size"] = _pixel_limits(written, processor["size"], most_pixels, least_pixels)
    elif most_pixels or least_pixels:
        raise DataError(
            "data_args.image_max_pixels and image_min_pixels: the processor of "
            f"'{family}' has fixed sizes; remove them."
        )
    token = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(token, int):
        raise DataError(f"{folder}/config.json: has no image_token_id.")
    return ImageRecipe(family, token, processor, _counts(family, whole, config))


PROCESSORS = {  # class in transformers -> family; Qwen3.5 has the processor of Qwen3-VL
    "Qwen2_5_VLProcessor": "qwen2_5_vl", "Qwen3VLProcessor": "qwen3_vl",
    "LlavaNextProcessor": "llava_next", "SmolVLMProcessor": "smolvlm",
}  # fmt: skip


def recipe_of_processor(processor: Any) -> ImageRecipe | None:
    """Return the recipe of a processor in memory; None for a tokenizer, or of another family."""
    names = [base.__name__ for base in type(processor).__mro__]
    family = next((PROCESSORS[name] for name in names if name in PROCESSORS), None)
    if family is None:
        return None
    written = parse_json(processor.image_processor.to_json_string())
    settings = {name: written[name] for name in SETTINGS if written.get(name) is not None}
    settings = DEFAULTS["qwen" if family in QWEN else family] | settings
    counts = _counts(family, vars(processor), {})
    return ImageRecipe(family, int(processor.image_token_id), settings, counts)


def _pixel_limits(written: Json, size: Json, most: int | None, least: int | None) -> Json:
    shortest = least or written.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    longest = most or written.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    if least is None:
        shortest = min(shortest, longest)
    elif shortest > longest:
        raise DataError(
            f"data_args.image_min_pixels: {shortest} is more than the largest number of pixels, "
            f"{longest}; lower it or raise image_max_pixels."
        )
    return {"shortest_edge": int(shortest), "longest_edge": int(longest)}


def _counts(family: str, whole: Json, config: Json) -> Json:
    """Return the numbers that a processor has next to those of its image processor."""
    vision = config.get("vision_config", {})
    if family == "llava_next":
        strategy = whole.get("vision_feature_select_strategy") or config.get(
            "vision_feature_select_strategy", "default"
        )
        # Older checkpoints do not say that their tower has one token besides those of patches.
        extra = whole.get("num_additional_image_tokens", 1 if strategy == "default" else 0)
        return {
            "patch_size": whole.get("patch_size") or vision.get("patch_size", 14),
            "num_additional_image_tokens": extra,
            "vision_feature_select_strategy": strategy,
        }
    return {"image_seq_len": whole.get("image_seq_len", 169)} if family == "smolvlm" else {}


def _read(path: Path) -> Json:
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
