"""Which tensors of a checkpoint's files become which weights of its model, and back.

transformers renames, stacks and cuts tensors when it opens a checkpoint. Its own mapping is applied
here to names and shapes alone, and backwards for an export. So the names in the files of the source
decide: a released checkpoint is exported under its released names.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.model.towers import leave_tower_out, new_model, tower_class

Shape = tuple[int, ...]


@dataclass
class Group:
    """Weights of a model that are made together from some tensors of the files."""

    weights: list[str]
    stored: dict[str, list[str]] = field(default_factory=dict)  # by pattern; experts in order
    converter: Any = None  # a WeightConverter; None: the one tensor has another name at most

    @property
    def files(self) -> list[str]:
        """Return the names of its tensors in the files."""
        return [name for names in self.stored.values() for name in names]

    @property
    def is_stack(self) -> bool:
        """Return whether its weight is a stack of matrices, or of matrices side by side."""
        if self.converter is None:
            return False
        operations = self.converter.operations
        kinds = [(type(entry), getattr(entry, "dim", None)) for entry in operations]
        return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def empty_model(config: PretrainedConfig, model_class: Any = None) -> Any:
    """Return a model without memory: of a class, or of that which opens a checkpoint."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # also of a tower that a kernel runs
    with torch.device("meta"), no_init_weights():
        if model_class is not None:
            return model_class(config)
        loader = tower_class(config) or AutoModelForCausalLM
        return new_model(loader, config, keeps_tower=True)


def empty_like(model: Any) -> Any:
    """Return a model of the same class without memory: whole, without changes of the training."""
    names = (kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    return empty_model(model.config, next(names))


def is_known(config: PretrainedConfig) -> bool:
    """Return whether transformers itself has the code of a model, and so knows its names."""
    return type(config).__module__.startswith("transformers.")


def usual_shapes(model: Any, live: Any) -> dict[str, Shape]:
    """Return names and shapes of the tensors that transformers writes for a model without source.

    `live` may have been read from files, whose names it then remembers.
    """
    if (used := getattr(live, "_weight_conversions", None)) is not None:
        model._weight_conversions = used
    state = dict(model.state_dict())
    for alias, name in tied_names(model).items():
        if name in state:
            state.pop(alias, None)
    return {name: tuple(t.shape) for name, t in revert_weight_conversion(model, state).items()}


def tied_names(model: Any) -> dict[str, str]:
    """Return the weights that are others, such as a head that is the embedding, by name."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


class Names:
    """The weights of a model, which has no memory, and the tensors of files with these shapes."""

    def __init__(self, model: Any, shapes: Mapping[str, Shape]) -> None:
        self.model, self.shapes, self.tied = model, dict(shapes), tied_names(model)
        self.unknown: list[str] = []  # tensors of the files that the model has no place for
        self.by_weight: dict[str, Group] = {}
        state = model.state_dict()
        self.state = {name: tuple(tensor.shape) for name, tensor in state.items()}
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {key: entry for entry in converters for key in entry.source_patterns}

        groups: dict[str, Group] = {}
        for name in sorted(shapes, key=dot_natural_key):  # as transformers reads them
            weight, pattern = rename_source_key(
                name, renamings, converters, model.base_model_prefix, state
            )
            if weight not in state and name in state:
                weight, pattern = name, None
            if weight not in state or (pattern is None and weight in groups):
                self.unknown.append(name)
                continue
            group = groups.setdefault(weight, Group([weight]))
            group.converter = by_pattern[pattern] if pattern else None
            group.stored.setdefault(pattern or name, []).append(name)
        self._add(groups.values())

    def _add(self, groups: Iterable[Group]) -> None:
        for group in groups:
            if group.converter is None or self._is_convertible(group):
                self.by_weight |= dict.fromkeys(group.weights, group)
            else:
                self.unknown += group.files

    @property
    def groups(self) -> list[Group]:
        """Return the groups by the names in the files."""
        groups = {id(group): group for group in self.by_weight.values()}
        return sorted(groups.values(), key=lambda group: min(group.files))

    def parameters(self, *, language_only: bool) -> set[str]:
        """Return the names of all parameters, of tied ones the first; or leave a tower out."""
        model = leave_tower_out(copy.deepcopy(self.model)) if language_only else self.model
        return {name for name, _ in model.named_parameters()}

    def of_weight(self, weight: str, weights: Collection[str]) -> str | None:
        """Return the one of `weights` that a weight is, or is tied to."""
        first = self.tied.get(weight, weight)
        names = [weight, first, *(alias for alias, name in self.tied.items() if name == first)]
        return next((name for name in names if name in weights), None)

    def _is_convertible(self, group: Group) -> bool:
        """Name all weights of a group; return whether they are what the model has."""
        empty = {name: torch.empty(self.shapes[name], device="meta") for name in group.files}
        try:
            weights_made = self.to_weights(group, empty)
        except (ValueError, RuntimeError, LookupError, AttributeError):
            return False  # loading the model reports it
        group.weights = list(weights_made)
        numbers = sum(prod(self.shapes[name]) for name in group.files)
        fits = all(tuple(weights_made[name].shape) == self.state.get(name) for name in weights_made)
        return fits and numbers == sum(tensor.numel() for tensor in weights_made.values())

    def to_weights(self, group: Group, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a group that has a converter."""
        converter, first = group.converter, group.weights[0]
        tensors: Any = {
            key: [stored[name] for name in names] for key, names in group.stored.items()
        }
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=first,
                model=self.model,
                config=self.model.config,
                missing_keys=None,
            )
        before, _, after = first.partition(converter.target_patterns[0])
        weights_made = {before + pattern + after: tensor for pattern, tensor in tensors.items()}
        return {name: t[0] if isinstance(t, list) else t for name, t in weights_made.items()}

    def blocks(self, group: Group) -> dict[str, ShardSpec]:
        """Return where each matrix of a file is in its stack."""
        shape = self.state[group.weights[0]]
        blocks, start = {}, 0
        for pattern in group.converter.source_patterns:
            names = group.stored.get(pattern, [])
            height = self.shapes[names[0]][0] if names else 0
            for expert, name in enumerate(names):
                blocks[name] = ShardSpec(shape, (expert, start, 0), (1, height, shape[2]))
            start += height
        return blocks

    def to_files(self, group: Group, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the files of a group.

        The operations of transformers only move numbers. Each is put where its position comes from.
        """
        first = weights[group.weights[0]]
        if group.is_stack:
            return {name: first[block.slices][0] for name, block in self.blocks(group).items()}
        sizes = [prod(self.shapes[name]) for name in group.files]
        kind = torch.int32 if sum(sizes) < 1 << 31 else torch.int64
        positions = torch.arange(sum(sizes), dtype=kind).split(sizes)
        numbered = {
            name: numbers.view(self.shapes[name])
            for name, numbers in zip(group.files, positions, strict=True)
        }
        flat = torch.empty(sum(sizes), dtype=first.dtype)
        for name, moved in self.to_weights(group, numbered).items():
            flat[moved.reshape(-1)] = weights[name].reshape(-1)
        tensors = zip(group.files, flat.split(sizes), strict=True)
        return {name: tensor.view(self.shapes[name]) for name, tensor in tensors}
