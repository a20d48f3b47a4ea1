"""Which tensors of a checkpoint's files become which weights of its model, and back.

transformers renames, stacks and cuts tensors when it opens a checkpoint. Its own mapping is applied
here to names and shapes alone, and backwards for an export. So the names in the files of the source
decide: a released checkpoint is exported under its released names.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
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

from rather.model.towers import leave_tower_out, new_model, tower_class

Shape = tuple[int, ...]


@dataclass
class Group:
    """Weights of a model that are made together from some tensors of the files."""

    weights: list[str]
    stored: dict[str, list[str]] = field(default_factory=dict)  # by pattern; experts in order
    converter: Any = None  # a WeightConverter; None: the one tensor has another name at most
    is_reversible: bool = True  # by the operations of transformers

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
        for group in groups.values():
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
        """Name all weights of a group, and find how they become tensors of the files again."""
        shapes = {name: self.shapes[name] for name in group.files}
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        try:
            made = self.to_weights(group, empty)
        except (ValueError, RuntimeError, LookupError, AttributeError):
            return False
        group.weights = list(made)
        if any(tuple(made[name].shape) != self.state.get(name) for name in made):
            return False  # loading the model reports it
        try:
            stored = self.to_files(group, made)
            is_equal = {name: tuple(tensor.shape) for name, tensor in stored.items()} == shapes
        except (ValueError, RuntimeError, LookupError, AttributeError):
            is_equal = False
        group.is_reversible = is_equal
        return is_equal or sum(map(prod, shapes.values())) == sum(t.numel() for t in made.values())

    def to_weights(self, group: Group, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a group."""
        if group.converter is None:
            return {group.weights[0]: stored[group.files[0]]}
        tensors = {key: [stored[name] for name in names] for key, names in group.stored.items()}
        made = self._convert(group.converter, tensors, group.weights[0])
        before, _, after = group.weights[0].partition(group.converter.target_patterns[0])
        return {before + pattern + after: tensor for pattern, tensor in made.items()}

    def to_files(self, group: Group, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the files of a group."""
        if group.converter is None:
            return {group.files[0]: weights[group.weights[0]]}
        if not group.is_reversible:
            return self._by_position(group, weights)
        back = group.converter.reverse_transform()
        sources = zip(back.source_patterns, group.weights, strict=True)
        tensors = {pattern: [weights[name]] for pattern, name in sources}
        made = self._convert(back, tensors, group.weights[0])
        names = {}
        for old, new in zip(group.converter.source_patterns, back.target_patterns, strict=True):
            for number, name in enumerate(group.stored.get(old, [])):
                names[new.replace("*", str(number))] = name
        return {names[pattern]: tensor for pattern, tensor in made.items()}

    def _by_position(self, group: Group, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put each number where its position comes from: the operations only move numbers."""
        sizes = [prod(self.shapes[name]) for name in group.files]
        positions = torch.arange(sum(sizes)).split(sizes)
        numbered = {
            name: part.view(self.shapes[name])
            for name, part in zip(group.files, positions, strict=True)
        }
        flat = torch.empty(sum(sizes), dtype=weights[group.weights[0]].dtype)
        for name, moved in self.to_weights(group, numbered).items():
            flat[moved.reshape(-1)] = weights[name].reshape(-1)
        parts = zip(group.files, flat.split(sizes), strict=True)
        return {name: part.view(self.shapes[name]) for name, part in parts}

    def _convert(self, transform: Any, tensors: Any, weight: str) -> dict[str, Tensor]:
        for operation in transform.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=transform.source_patterns,
                target_patterns=transform.target_patterns,
                full_layer_name=weight,
                model=self.model,
                config=self.model.config,
                missing_keys=None,
            )
        return {key: t[0] if isinstance(t, list) else t for key, t in tensors.items()}
