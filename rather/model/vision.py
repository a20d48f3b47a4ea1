"""Pairs with images: the tower stays in the model, and its features join the packed tokens.

An image's features are computed once for each micro-batch, one image at a time: a product of more
rows rounds differently, and a feature must not depend on the neighbours of its image, or a run
whose cache was filled in another order would not repeat to the bit. They replace the embeddings of
the image's tokens. Everything after that sees packed tokens as ever: segments, layers, head.
Positions in three dimensions come from the model's own function, for each prompt once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rather.data.batch import PairBatch, PromptImage
from rather.data.pixel_loader import Maker, PixelLoader, Pixels
from rather.errors import ConfigError, DataError
from rather.model.image_features import FeatureStore
from rather.model.image_tower import TowerGraphs, arrange_tower, tower_layout

PARTS = ("vision", "projector")  # of a model outside its language model; frozen by default


@dataclass(frozen=True)
class Family:
    """Where a family keeps what only images reach, by the names in its base model."""

    tower: str
    projector: tuple[str, ...]  # may be inside the tower
    in_space: bool = False  # positions of image tokens have three dimensions
    in_rows: bool = False  # its own forward takes the tiles of all images of a prompt in one row

    def part_of(self, name: str) -> str | None:
        """Return the part of the model that a parameter belongs to; None: the language model."""
        if _below(self.projector).search(name):
            return "projector"
        return "vision" if _below([self.tower]).search(name) else None

    @property
    def excluded(self) -> str:
        """PEFT's `exclude_modules` of an adapter of the language model."""
        return f".*{self.outside_language.pattern}.*"

    @property
    def outside_language(self) -> re.Pattern[str]:
        """Matches parameters and modules of the tower and the projector, also by older names."""
        return _below([self.tower, *self.projector])


FAMILIES = {
    "qwen2_5_vl": Family("visual", ("visual.merger",), in_space=True),
    "qwen3_vl": Family("visual", ("visual.merger", "visual.deepstack_merger_list"), in_space=True),
    "qwen3_5": Family("visual", ("visual.merger",), in_space=True),
    "llava_next": Family("vision_tower", ("multi_modal_projector", "image_newline")),
    "smolvlm": Family("vision_model", ("connector",), in_rows=True),
}
BOTH_WAYS = ("gemma", "paligemma")  # their image tokens see each other


def _below(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.)(?:{'|'.join(map(re.escape, names))})(?:\.|$)")


def part_of(name: str) -> str | None:
    """Return the part that a weight of any family belongs to; None: the language model."""
    parts = (family.part_of(name) for family in FAMILIES.values())
    return min(filter(None, parts), default=None)  # a projector may be inside a tower


def family_of(config: PretrainedConfig) -> Family:
    """Return the family of a model that trains on images; refuse all others."""
    kind = config.model_type
    if kind in FAMILIES:
        return FAMILIES[kind]
    reason = "it was not compared with its own forward on images"
    if kind.startswith(BOTH_WAYS):
        reason = "tokens of an image attend to each other both ways, which packed pairs cannot"
    if config.get_text_config() is config:
        reason = "it has no vision tower"
    raise ConfigError(
        f"model family '{kind}' cannot be trained on pairs with images: {reason}. Families that "
        f"can: {', '.join(FAMILIES)}."
    )


def keep_tower(causal_lm: Any, frozen: Collection[str]) -> None:
    """Prepare a model for images; the `frozen` parts, "vision" or "projector", do not train."""
    family = family_of(causal_lm.config)
    tower = getattr(causal_lm.model, family.tower)
    if family.in_space:
        arrange_tower(tower)
    else:
        tower.set_attn_implementation("sdpa")
    for name, module in causal_lm.named_modules():
        if family.outside_language.search(name):
            module.outside_language = True
    for name, parameter in causal_lm.named_parameters():
        if family.part_of(name) in frozen:
            parameter.requires_grad_(False)
    causal_lm.sees_images, causal_lm.frozen_parts = True, frozenset(frozen)


def frozen_outside_language(causal_lm: Any) -> set[str]:
    """Return the names of the weights of tower and projector that did not train."""
    if not getattr(causal_lm, "sees_images", False):
        return set()
    family = family_of(causal_lm.config)
    named = causal_lm.named_parameters()
    return {name for name, _ in named if family.part_of(name) in causal_lm.frozen_parts}


def pixels_of_rows(
    config: PretrainedConfig, ids_BT: Tensor, rows: Sequence[Sequence[PromptImage]], maker: Maker
) -> dict[str, Tensor]:
    """Return what the model's own forward takes of the images of several prompts."""
    made = [[maker.pixels([image]) for image in row] for row in rows]
    every = [pixels for row in made for pixels in row]
    family = family_of(config)
    if family.in_space:
        joined = {name: torch.cat([pixels[name] for pixels in every]) for name in every[0]}
        joined["mm_token_type_ids"] = (ids_BT == config.image_token_id).int()
    else:
        # Tiles of an image, or of all images of a prompt, follow one another, filled up with zeros.
        lines = made if family.in_rows else [[pixels] for pixels in every]
        joined = {name: _join_tiles(lines, name, every[0][name]) for name in every[0]}
    return {name: tensor.to(ids_BT.device) for name, tensor in joined.items()}


def _join_tiles(lines: Sequence[Sequence[Pixels]], name: str, example: Tensor) -> Tensor:
    rows = [torch.cat([example[:, :0], *(pixels[name] for pixels in line)], 1) for line in lines]
    most = max(row.shape[1] for row in rows)
    missing = [row.new_zeros(1, most - row.shape[1], *row.shape[2:]) for row in rows]
    return torch.cat([torch.cat(pair, 1) for pair in zip(rows, missing, strict=True)])


class Vision:
    """Puts the images of a micro-batch into what a language model sees."""

    def __init__(
        self,
        causal_lm: Any,
        loader: PixelLoader,
        store: FeatureStore | None = None,
        *,
        sums_gradients: bool = False,
    ) -> None:
        """`store` keeps features of a model whose tower and projector do not change.

        Ranks with `sums_gradients` must have one for each weight, if only zeros: a rank without
        images would otherwise skip a sum that the others wait in.
        """
        self.base, self.loader, self.store = causal_lm.model, loader, store
        self.sums_gradients = sums_gradients
        self.family = family_of(causal_lm.config)
        self.image_token: int = causal_lm.config.image_token_id
        self.computed = 0  # images that went through the tower
        self.hits = 0  # images whose features were stored
        tower = getattr(self.base, self.family.tower)
        self.layout = lru_cache(maxsize=256)(partial(tower_layout, tower))
        self.graphs = TowerGraphs(tower)

    def parameters(self) -> list[nn.Parameter]:
        """Return those of tower and projector; sharding and loading replace them."""
        named = self.base.named_parameters()
        return [parameter for name, parameter in named if self.family.part_of(name)]

    def ahead(self, batches: Iterable[PairBatch]) -> None:
        """Begin to make the pixels of images whose features are not known."""
        images = {image.digest: image for batch in batches for image in batch.images}
        self.loader.begin(
            image for image in images.values() if not (self.store and self.store.has(image))
        )

    def place(self, batch: PairBatch) -> PairBatch:
        """Return a batch, on the CPU, with the positions that its images give to the tokens."""
        if not batch.images or batch.positions_N.ndim > 1:
            return batch
        ids_N = batch.ids_N.cpu()
        is_image_N = ids_N == self.image_token
        expected = sum(image.tokens for image in batch.images)
        if int(is_image_N.sum()) != expected:
            raise DataError(
                f"a micro-batch has {int(is_image_N.sum())} image tokens (id {self.image_token}), "
                f"but its images have {expected}; an answer or a prompt holds image tokens of its "
                "own."
            )
        if not self.family.in_space:
            return batch
        positions_3N = self._positions(batch, ids_N, is_image_N)
        return replace(batch, positions_N=positions_3N.to(batch.ids_N.device))

    def _positions(self, batch: PairBatch, ids_N: Tensor, is_image_N: Tensor) -> Tensor:
        """Return positions [3, N]: of each whole sequence by the model, others follow theirs."""
        positions_3N = batch.positions_N.cpu().expand(3, -1).clone()
        images = iter(batch.images)
        shift_N = torch.zeros_like(ids_N)  # of what follows a sequence that begins here
        segments = batch.segments
        paths = segments.key_index_K.cpu().split(segments.k_lens)
        start = 0
        for length, path in zip(segments.q_lens, paths, strict=True):
            own = slice(start, start + length)
            start += length
            if len(path) > length:
                positions_3N[:, own] += shift_N[path[0]]
                continue
            grids = []
            left = int(is_image_N[own].sum())
            while left > 0:
                image = next(images)
                grids.append(image.grid)
                left -= image.tokens
            if grids:
                whole_3T, shift = self._of_sequence(ids_N[own], is_image_N[own], grids)
                positions_3N[:, own] = whole_3T
                shift_N[own.start] = shift
        return positions_3N

    def _of_sequence(
        self, ids_T: Tensor, is_image_T: Tensor, grids: list[tuple[int, ...]]
    ) -> tuple[Tensor, int]:
        positions, shift = self.base.get_rope_index(
            ids_T[None],
            mm_token_type_ids=is_image_T[None].int(),
            image_grid_thw=torch.tensor(grids),
            attention_mask=torch.ones_like(ids_T[None]),
        )
        return positions[:, 0], int(shift)

    def inputs(self, batch: PairBatch) -> dict[str, Any]:
        """Return what the language model takes besides positions and segments."""
        if not batch.images and not self.sums_gradients:
            return {"input_ids": batch.ids_N[None]}
        embedded: Tensor = self.base.get_input_embeddings()(batch.ids_N[None])
        if self.sums_gradients and torch.is_grad_enabled():
            trained = [p for p in self.parameters() if p.requires_grad]
            embedded = embedded + sum(parameter.flatten()[0] * 0 for parameter in trained)
        if not batch.images:
            return {"inputs_embeds": embedded}
        features = {}
        for image in batch.images:
            if image.digest not in features:
                features[image.digest] = self._features(image, embedded.device)
        rows_LTD = torch.cat([features[image.digest] for image in batch.images], dim=1)
        rows_LTD = rows_LTD.to(embedded.dtype)
        is_image = (batch.ids_N == self.image_token)[None]
        inputs: dict[str, Any] = {
            "inputs_embeds": embedded.masked_scatter(is_image[..., None], rows_LTD[0])
        }
        if len(rows_LTD) > 1:  # of inner layers of the tower, added behind the first layers
            inputs["visual_pos_masks"] = is_image
            inputs["deepstack_visual_embeds"] = list(rows_LTD[1:].unbind())
        return inputs

    def _features(self, image: PromptImage, device: torch.device) -> Tensor:
        """Return the rows of an image, [1 + inner layers, tokens, width]."""
        if self.store is None:
            return self.compute(image, device)
        stored = self.store.read(image)
        if stored is not None:
            self.loader.drop(image)
            self.hits += 1
            return stored.to(device, non_blocking=True)
        with torch.no_grad():
            computed = self.compute(image, device)
        self.store.write(image, computed)
        return computed

    def compute(self, image: PromptImage, device: torch.device) -> Tensor:
        made = self.loader.take(image)
        if self.family.in_space:
            patches = _to_device(made["pixel_values"], device)
            layout = self.layout(image.grid, device)
            # The grid stays on the host: it is read, which would wait for the device.
            compute = partial(self._rows, image_grid_thw=made["image_grid_thw"], **layout)
            rows_LTD = self.graphs.run(image.grid, patches, compute)
        else:
            tensors = {name: _to_device(tensor, device) for name, tensor in made.items()}
            rows_LTD = self._rows(**tensors)
        self.computed += 1
        if rows_LTD.shape[1] != image.tokens:
            raise DataError(
                f"an image has {image.tokens} tokens in its prompt, but the model makes "
                f"{rows_LTD.shape[1]} of it; the processor's files do not belong to this model."
            )
        return rows_LTD

    def _rows(self, pixel_values: Tensor, **options: Any) -> Tensor:
        output = self.base.get_image_features(pixel_values, **options)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        # Rows of one image: as a tuple of one tensor, or in older transformers as the tensor.
        return torch.stack([x if isinstance(x, Tensor) else torch.cat(x) for x in layers])

    def counts(self) -> tuple[int, int]:
        """Return how often features of an image came from the cache, and how often they did not."""
        return self.hits, self.computed

    def close(self) -> None:
        """End the processes that make pixels, and wait until the features are on the disk."""
        self.loader.close()
        if self.store:
            self.store.flush()


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor without waiting for what the device has still to do."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
