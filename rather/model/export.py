"""Export trained weights as a folder for `from_pretrained`: weights, config, tokenizer, card."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from torch import Tensor

from rather.checkpoint.sharded_tensors import (
    ShardedFiles,
    ShardSpec,
    TensorStream,
    safetensors_file,
)
from rather.config.schema import ModelArgs
from rather.errors import ConfigError, DiskError
from rather.files import refuse_outside, sync
from rather.model.files import ModelFiles, model_folder, weight_files, weights_digest
from rather.model.megatron import model_files
from rather.model.names import Group, Names, empty_like, usual_shapes
from rather.model.policy import PolicyModel
from rather.model.proof import prove_adapter, prove_export
from rather.model.reward import merging_files, set_padding
from rather.model.towers import has_tower
from rather.model.vision import frozen_outside_language
from rather.optim.rounding import CHUNK, Rounding, plain_name

PROCESSOR = ("*processor*.json", "chat_template.json")
LARGEST_FILE = 4_000_000_000  # bytes, transformers' "4GB"


@dataclass
class Kept:
    """How much of an update the weights in a file keep. Sums over the weights of the model."""

    dot: float = 0.0  # of the written change and the true one
    square: float = 0.0  # of the true change
    changed: int = 0  # float32 weights that differ from the source
    written: int = 0  # weights in the file that differ from the source
    weights: int = 0
    # Of matrices only: norms, which no weight decay touches, are larger than all others.
    in_matrices: int = 0
    square_before: float = 0.0  # of the source
    square_after: float = 0.0  # of the file

    @property
    def share(self) -> float | None:
        """The projection of the written change on the true one; None if nothing changed."""
        return self.dot / self.square if self.square else None

    def as_json(self) -> dict[str, float]:
        """Return what is known, under the names of rather.tracking.outcome."""
        counts = {"changed_masters": self.changed, "changed_file": self.written}
        numbers = {name: count / self.weights for name, count in counts.items() if self.weights}
        squares = {"weight_size_before": self.square_before, "weight_size": self.square_after}
        for name, square in squares.items() if self.in_matrices else ():
            numbers[name] = math.sqrt(square / self.in_matrices)
        return numbers if self.share is None else numbers | {"kept_share": self.share}

    def __str__(self) -> str:
        if not self.weights:
            return "the change of the weights is unknown: their source is not here"
        if self.share is None:
            return "the weights did not change"
        return (
            f"the file keeps {self.share:.2%} of the update; it changes "
            f"{self.written / self.weights:.2%} of the weights ({self.changed / self.weights:.2%} "
            "in float32)"
        )


class FileCast:
    """Rounds weights to the dtype of a file, and compares them with the files of the source."""

    def __init__(
        self, dtype: torch.dtype, rounding: Rounding, source: ShardedFiles | None = None
    ) -> None:
        self.dtype, self.rounding, self.source, self.kept = dtype, rounding, source, Kept()
        # Name of a tensor -> its weights that are not 0, and those of them that are 0 in float16.
        self.zeroed: dict[str, tuple[int, int]] = {}

    def __call__(self, name: str, value: Tensor, spec: ShardSpec | None = None) -> Tensor:
        name, spec = plain_name(name), spec or ShardSpec.full(value.shape)
        cast = self.rounding.cast(name, value, self.dtype, spec)
        if self.dtype == torch.float16 and value.dtype != torch.float16:
            nonzero, lost = self.zeroed.get(name, (0, 0))
            count = int(value.count_nonzero())
            self.zeroed[name] = nonzero + count, lost + count - int(cast.count_nonzero())
        if self.source is not None and name in self.source:
            for tensors in _in_chunks(self.source.read(name, spec), value, cast):
                self._compare(*tensors, is_matrix=value.ndim > 1)
        return cast

    @property
    def became_zero(self) -> str:
        """Say how many weights float16 cannot hold; refuse if a whole tensor of them would be 0."""
        for name, (nonzero, lost) in self.zeroed.items():
            if nonzero and lost == nonzero:
                raise ConfigError(
                    f"all {nonzero:,} weights of {name} are too small for float16 and would become "
                    "0; use --dtype bf16 or fp32."
                )
        total = sum(nonzero for nonzero, _ in self.zeroed.values())
        lost = sum(lost for _, lost in self.zeroed.values())
        return f"{lost:,} of {total:,} weights became 0 in float16" if lost else ""

    def _compare(self, before: Tensor, value: Tensor, cast: Tensor, *, is_matrix: bool) -> None:
        before, totals = before.to(value.device).float(), self.kept
        true, written = value.float() - before, cast.float() - before
        totals.dot += float((true * written).sum(dtype=torch.float64))
        totals.square += float(true.square().sum(dtype=torch.float64))
        totals.changed += int(true.count_nonzero())
        totals.written += int(written.count_nonzero())
        totals.weights += true.numel()
        if is_matrix:
            totals.in_matrices += true.numel()
            totals.square_before += float(before.square().sum(dtype=torch.float64))
            totals.square_after += float(cast.float().square().sum(dtype=torch.float64))


def _in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.reshape(-1).split(CHUNK) for tensor in tensors), strict=True)


def export_run(
    policy: PolicyModel,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    tokenizer: Any,
    folder: Path,
    card: str,
) -> Kept:
    """Export the weights of a run, whole or as shards in files.

    Export an adapter for PEFT next to `folder`, and the merged model in `folder`.
    """
    target, model, (name, args) = (tokenizer, folder, card), policy.causal_lm, source
    if policy.is_reward:
        set_padding(model.config, tokenizer)
    base = model_files(name, args, model.config)
    if not args.has_adapter and not isinstance(weights, ShardedFiles):
        return export_model(policy, weights, *target, base)
    cast = FileCast(model.config.dtype, policy.rounding, base)
    if isinstance(weights, ShardedFiles) and not args.has_adapter:
        return export_stored(model, weights, *target, cast)
    from rather.model.adapters import merge  # PEFT takes seconds to import

    assert base is not None
    if policy.is_reward:
        # `cast` compares with the files as they are. A head that they lack did not start there, and
        # its whole change would outweigh that of the other weights.
        base = merging_files(weight_files(model_folder(name, args.revision)), model)
    adapter = folder.with_name(folder.name.replace("model", "adapter"))  # best_model: best_adapter
    base_folder = model_folder(name, args.revision)
    trained_on = weights_digest(base_folder) if base_folder else None
    temporary = whole_adapter(model, weights, source, tokenizer, adapter, trained_on)
    publish(temporary, adapter, card)
    temporary = write_model(model, merge(base, adapter, cast), tokenizer, folder, source=base)
    publish(temporary, folder, _with_share(card, cast.kept))
    return cast.kept


def export_model(
    policy: PolicyModel,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
    card: str,
    source: ShardedFiles | None = None,
) -> Kept:
    """Export `weights` (with the policy's names) in the dtype of the source model, atomically."""
    cast = FileCast(policy.causal_lm.config.dtype, policy.rounding, source)
    temporary = whole_model(policy, weights, tokenizer, folder, cast)
    publish(temporary, folder, _with_share(card, cast.kept))
    return cast.kept


def export_peft(model: Any, tokenizer: Any, folder: Path, card: str) -> None:
    """Write the adapter of a PEFT model that is in memory, for PEFT."""
    with _new_folder(folder, tokenizer) as temporary:
        model.save_pretrained(temporary)
    publish(temporary, folder, card)


def export_stored(
    model: Any, stored: ShardedFiles, tokenizer: Any, folder: Path, card: str, cast: FileCast
) -> Kept:
    """Export weights that several ranks have written to files; `model` gives only its configs.

    They are streamed: at most some rows of one weight are in memory.
    """
    weights = {plain_name(name): stored.stream(name, cast) for name in sorted(stored)}
    temporary = write_model(model, weights, tokenizer, folder, source=cast.source)
    publish(temporary, folder, _with_share(card, cast.kept))
    return cast.kept


def _trained(
    model: Any, weights: Mapping[str, TensorStream], names: Names, files: ModelFiles | None
) -> dict[str, TensorStream]:
    """Return the weights that are not copied from the source; without one, all of the model."""
    trains = names.parameters(language_only=bool(getattr(model, "left_out", 0)))
    if files:
        trains -= frozen_outside_language(model)
    weights = {name: stream for name, stream in weights.items() if name in trains}
    if lost := sorted(name for name in trains if names.of_weight(name, weights) is None):
        raise ConfigError(f"{len(lost)} weights of the model were not trained: {lost[0]}")
    if files is None:
        state = model.state_dict()
        buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
        weights |= {name: TensorStream.of(buffer) for name, buffer in buffers.items()}
    return weights


def _as_in_files(
    weights: Mapping[str, TensorStream], names: Names, files: ModelFiles | None, *, reward: bool
) -> dict[str, TensorStream]:
    """Return the tensors of the files: by the names in the source, or those usual for the family.

    What was not trained, such as a tower and buffers, is copied from the source bit by bit.
    """
    tensors: dict[str, TensorStream] = {}
    for group in names.groups:
        made_of = {name: names.of_weight(name, weights) for name in group.weights}
        streams = {name: weights[key] for name, key in made_of.items() if key}
        if streams:
            tensors |= _tensors_of(names, group, streams)
        elif files:
            tensors |= {name: files.unchanged(name) for name in group.files}
    in_groups = {names.of_weight(name, weights) for name in names.by_weight}
    tensors |= {name: weights[name] for name in sorted(weights.keys() - in_groups)}
    if files and not reward:  # the head of words is not in the class of a reward model
        tensors |= {name: files.unchanged(name) for name in names.unknown}
    return tensors


def names_of(model: Any, source: ModelFiles | None) -> Names:
    """Return how the weights of a model become the tensors of files like those of its source."""
    empty = empty_like(model)
    if source is None:
        return Names(empty, usual_shapes(empty, model))
    return Names(empty, {name: source.stored.shape(name) for name in source.stored})


def _tensors_of(
    names: Names, group: Group, weights: Mapping[str, TensorStream]
) -> dict[str, TensorStream]:
    """Return the tensors of a group, which are made together when the first one is written."""
    if group.converter is None:
        return {group.files[0]: weights[group.weights[0]]}
    waiting: dict[str, Tensor] = {}

    def make(name: str) -> Tensor:
        if name not in waiting:
            tensors = {key: _whole(stream) for key, stream in weights.items()}
            waiting.update(names.to_files(group, tensors))
        return waiting.pop(name)

    dtype = weights[group.weights[0]].dtype
    return {
        name: TensorStream.late(dtype, names.shapes[name], partial(make, name))
        for name in group.files
    }


def _whole(stream: TensorStream) -> Tensor:
    flat = torch.empty(math.prod(stream.shape), dtype=stream.dtype)
    start = 0
    for rows in stream.parts():
        flat[start : start + rows.numel()] = rows.reshape(-1)
        start += rows.numel()
    return flat.view(stream.shape)


def _with_share(card: str, kept: Kept) -> str:
    return f"{card}\nOf the training, {kept}.\n" if kept.share is not None else card


def whole_model(
    policy: PolicyModel,
    weights: Mapping[str, Tensor],
    tokenizer: Any,
    folder: Path,
    cast: FileCast,
    largest: int | None = None,
    source: ShardedFiles | None = None,
) -> Path:
    """Write a model that `publish` renames to `folder`, in files of at most `largest` bytes."""
    streams = {
        plain_name(name): TensorStream.late(
            cast.dtype, tuple(parameter.shape), partial(_rounded, cast, name, weights, parameter)
        )
        for name, parameter in policy.named_parameters()
    }
    model = policy.causal_lm
    return write_model(model, streams, tokenizer, folder, largest, source or cast.source)


def _rounded(cast: FileCast, name: str, weights: Mapping[str, Tensor], parameter: Tensor) -> Tensor:
    return cast(name, weights.get(name, parameter).detach()).cpu()


def whole_adapter(
    model: Any,
    weights: Mapping[str, Tensor],
    source: tuple[str, ModelArgs],
    tokenizer: Any,
    folder: Path,
    trained_on: str | None,
) -> Path:
    """Write an adapter that `publish` renames to `folder`."""
    from rather.model.adapters import write_adapter

    with _new_folder(folder, tokenizer) as temporary:
        write_adapter(temporary, model, weights, source, trained_on)
        prove_adapter(temporary, model)
    return temporary


def write_model(
    model: Any,
    weights: Mapping[str, TensorStream],
    tokenizer: Any,
    folder: Path,
    largest: int | None = None,
    source: ShardedFiles | None = None,
) -> Path:
    """Write streamed weights as a model that `publish` renames to `folder`.

    `source` has the tower of a checkpoint, if it has one.
    """
    files = source if isinstance(source, ModelFiles) else None
    if files is None and getattr(model, "left_out", False):
        raise ConfigError(
            f"the tower of '{model.config.model_type}' was not trained and is copied from the "
            "model that the run started from, which is not on this machine; restore its folder."
        )
    names = names_of(model, files)
    weights = _trained(model, weights, names, files)
    tensors = _as_in_files(weights, names, files, reward=hasattr(model, "score"))
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest or LARGEST_FILE,
    )
    with _new_folder(folder, tokenizer) as temporary:
        _write_configs(model, temporary)
        for file, keys in split.filename_to_tensors.items():
            with open(temporary / file, "xb") as target:
                target.writelines(safetensors_file({key: tensors[key] for key in keys}, {}))
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2) + "\n"
            (temporary / "model.safetensors.index.json").write_text(text, "utf-8")
        if has_tower(model) and files and files.folder:
            _copy_processor(files.folder, temporary)
        prove_export(temporary, model, names, has_source=files is not None)
    return temporary


def _copy_processor(source: Path, folder: Path) -> None:
    """Copy the files of a checkpoint that prepare images and sounds, bit by bit."""
    for pattern in PROCESSOR:
        for file in sorted(source.glob(pattern)):
            refuse_outside(source, file)
            shutil.copyfile(file, folder / file.name)


def _write_configs(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    config.pop("quantization_config", None)  # of the training; the export is not quantised
    config["dtype"] = str(model.config.dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    if not hasattr(model, "score"):
        model.generation_config.to_json_file(folder / "generation_config.json")


@contextmanager
def _new_folder(folder: Path, tokenizer: Any) -> Iterator[Path]:
    """Create the temporary folder that `publish` renames; the tokenizer is added at the end."""
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    with _removed_on_error(temporary, folder):
        temporary.mkdir(parents=True)
        yield temporary
        tokenizer.save_pretrained(temporary)


@contextmanager
def _removed_on_error(temporary: Path, folder: Path) -> Iterator[None]:
    """Remove the temporary folder on any error; report a disk error as one."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # The writer of safetensors does not raise OSError.
        if not isinstance(error, OSError | SafetensorError):
            raise
        cause = getattr(error, "strerror", None) or error
        raise DiskError(
            f"{folder}: could not be written ({cause}). Free some disk space and run the same "
            "command again; an earlier export is unchanged."
        ) from error


def publish(temporary: Path, folder: Path, card: str) -> None:
    """Add the card and rename a temporary folder to `folder`, atomically."""
    old = folder.with_name(f".old-{folder.name}")
    with _removed_on_error(temporary, folder):
        (temporary / "README.md").write_text(card, "utf-8")
        mode = (temporary / "README.md").stat().st_mode
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file():
                path.chmod(mode)  # the writer of safetensors ignores the umask
            sync(path)
        shutil.rmtree(old, ignore_errors=True)
        try:
            if folder.exists():
                folder.rename(old)
            temporary.rename(folder)
            sync(folder.parent)
        except BaseException:
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
