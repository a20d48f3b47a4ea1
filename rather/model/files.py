"""The files of a model or adapter folder: where it is, what it contains, and its digest.

A folder comes from others: names and links that lead out of it are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig

from rather.checkpoint.sharded_tensors import ShardedFiles, ShardSpec, TensorStream
from rather.config.paths import is_local
from rather.errors import ConfigError
from rather.files import (
    MOST_JSON_BYTES,
    parse_json,
    read_json,
    refuse_outside,
    regular,
    text_sha,
)
from rather.model.mxfp4 import BLOCKS, SCALES, PackedExperts
from rather.model.names import Names, empty_model, is_known

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Fields of config.json that no forward pass reads: its author, the dtype on the disk, generation.
NOT_IN_A_FORWARD = frozenset({
    "_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "bos_token_id",
    "eos_token_id", "pad_token_id", "decoder_start_token_id", "output_attentions",
    "output_hidden_states", "return_dict", "id2label", "label2id",
    "problem_type", "task_specific_params",
})  # fmt: skip
# Of the digest of weights: bytes up to which all are hashed, blocks of larger tensors and their
# size, and the number of blocks above which each tensor has two only.
MOST_HASHED = 1 << 30
SPOTS, SPOT, MOST_SPOTS = 8, 512, 40_000
BLOCK = 1 << 20
BASE_WEIGHTS = "base weights"  # its key in the identity of a checkpoint
CONTENT = ("*.safetensors", "*.py")
# Parts of a checkpoint that only images or sounds reach.
TOWER = re.compile(
    r"(?:^|\.)(?:(?:vision|visual|image|audio|speech|multi_modal|mm_|embed_vision|embed_audio|"
    r"connector)[a-z_]*\.|image_newline$)"
)
TOWER_CONFIGS = ("vision_config", "audio_config")


def model_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model, or the snapshot of a hub name; None if it is unavailable."""
    if is_local(name):
        return Path(name).expanduser()
    try:
        patterns = [*CONTENT, "*.json"]
        snapshot = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
        return Path(snapshot)
    except (OSError, ValueError):  # loading the model will report why
        return None


def weight_files(folder: Path | None) -> list[Path]:
    """Return the one file of weights, or those in the index, in the order of transformers."""
    if folder is None:
        raise FileNotFoundError("neither a folder nor a hub model that is available")
    names, index = [WEIGHTS], folder / INDEX
    if not (folder / WEIGHTS).exists() and index.exists():
        try:
            listed = read_json(index)["weight_map"]
            names = sorted(set(map(str, listed.values())))
        except Exception as error:  # an untrusted file may hold anything
            raise ConfigError(f"{index}: is not an index of weight files ({error!r})") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{index}: lists {name!r}; only .safetensors files next to it are read"
            )
        refuse_outside(folder, folder / name)
    return [folder / name for name in names]


class ModelFiles(ShardedFiles):
    """The weights of a model folder by the names that the model has for them.

    Iteration yields the names in the files, which `stored` reads as they are.
    """

    def __init__(self, files: Iterable[Path], config: Any = None) -> None:
        """`config` is that of the model, if it is known."""
        files = list(files)
        super().__init__(files)
        self.folder = files[0].parent if files else None
        self.config = config
        self.stored = ShardedFiles([])
        self.stored._shards = self._shards
        packed = [name for name in self._shards if name.endswith(BLOCKS)]
        self.is_packed = bool(packed)
        for name in packed:
            self._unpack(name.removesuffix(BLOCKS))
        self._made = lru_cache(1)(self._make)

    @cached_property
    def names(self) -> Names | None:
        """How the tensors become weights; None if they have the names of the model's own code."""
        config = self.config
        if self.folder is None or not (config is None or is_known(config)):
            return None
        try:
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)  # nosec B615
        except (OSError, ValueError):
            return None
        shapes = {name: self.stored.shape(name) for name in self.stored}
        return Names(empty_model(config), shapes)

    @cached_property
    def weights(self) -> list[str]:
        """The names of the model, and those in the files that it has no place for."""
        return list(self.stored if self.names is None else self._converted)

    @cached_property
    def _converted(self) -> dict[str, dict[tuple[int, ...], Any]]:
        assert self.names is not None
        shards = {name: self.stored._shards[name] for name in self.names.unknown}
        for weight, group in self.names.by_weight.items():
            if group.converter is None:
                shards[weight] = self._under(group.files[0])
            elif group.is_stack:
                shards[weight] = self._stack(self.names.blocks(group))
            else:
                spec = ShardSpec.full(self.names.state[weight])
                file = _Made(partial(self._made, group.weights[0]), weight)
                shards[weight] = {spec.offsets: (file, spec)}
        return shards

    def _resolve(self) -> None:
        if self._shards is self.stored._shards and self.names is not None:
            self._shards = self._converted

    def __contains__(self, name: object) -> bool:
        self._resolve()
        return super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        self._resolve()
        return super().shape(name)

    def dtype(self, name: str) -> torch.dtype:
        if name in self.stored:
            return self.stored.dtype(name)
        self._resolve()
        return super().dtype(name)

    def _make(self, first: str) -> dict[str, Tensor]:
        assert self.names is not None
        group = self.names.by_weight[first]
        return self.names.to_weights(group, self.stored)

    def _under(self, name: str) -> dict[tuple[int, ...], Any]:
        """Return the shards of a tensor, for another name than that in its file."""
        return {
            offsets: (_Renamed(file, name), spec)
            for offsets, (file, spec) in self.stored._shards[name].items()
        }

    def _unpack(self, name: str) -> None:
        """Offer experts of four bits as the tensor that the model has."""
        halves = [self._shards.pop(name + half, {}) for half in (BLOCKS, SCALES)]
        try:
            (blocks, _), (scales, _) = (next(iter(half.values())) for half in halves)
            packed = PackedExperts(blocks.get_slice(name + BLOCKS), scales.get_slice(name + SCALES))
        except (StopIteration, RuntimeError, ValueError) as error:
            raise ConfigError(f"{name!r} of the weights cannot be unpacked: {error}") from error
        spec = ShardSpec.full(packed.shape)
        self._shards[name] = {spec.offsets: (packed, spec)}

    def _stack(self, blocks: Mapping[str, ShardSpec]) -> dict[tuple[int, ...], Any]:
        """Return the matrices of all experts as one tensor: a rank reads those that it holds."""
        shards: dict[tuple[int, ...], Any] = {}
        for name, block in blocks.items():
            (file, _) = next(iter(self.stored._shards[name].values()))
            shards[block.offsets] = (_Renamed(file, name, stacked=True), block)
        return shards

    def unchanged(self, name: str) -> TensorStream:
        """Return a tensor as it is stored, bit by bit."""
        read = partial(self.stored.__getitem__, name)
        return TensorStream.late(self.stored.dtype(name), self.stored.shape(name), read)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


class LoadedWeights(ModelFiles):
    """The weights of a model that transformers has read whole, under the model's own names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__([])
        for name, tensor in tensors.items():
            spec = ShardSpec.full(tensor.shape)
            self._shards[name] = {spec.offsets: (InMemory(tensor), spec)}


class InMemory:
    """A tensor that is read like one of a safetensors file."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_tensor(self, _name: str) -> Tensor:
        return self.tensor

    def get_slice(self, _name: str) -> InMemory:
        return self

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        return self.tensor[slices]


class _Made(InMemory):
    """A weight that is made of several tensors, or by more than another name."""

    def __init__(self, make: Callable[[], dict[str, Tensor]], name: str) -> None:
        self.make, self.name = make, name

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        return self.make()[self.name]


class _Renamed:
    """A tensor of a file under another name, or a matrix as a part of a stack of experts."""

    def __init__(self, file: Any, name: str, *, stacked: bool = False) -> None:
        self.file, self.name, self.stacked = file, name, stacked

    def get_slice(self, _name: str) -> Any:
        return self if self.stacked else self.file.get_slice(self.name)

    def get_tensor(self, _name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        matrix: Tensor = self.file.get_slice(self.name)[slices[1:]]
        return matrix[None]


def model_digest(folder: Path, sha: Callable[[Path], str]) -> str | None:
    """Return a digest of all that decides the log-probs: weights, code, and config fields.

    `sha` hashes a file. A tower, which text never reaches, is left out. Return None if there are no
    weights or the files cannot be read.
    """
    try:
        files = sorted(file for pattern in CONTENT for file in folder.glob(pattern))
        if _has_tower(folder):
            code = {file.name: sha(file) for file in files if file.suffix == ".py"}
            weights = weights_digest(folder)
            return text_sha(json.dumps([_forward_fields(folder), weights, code], sort_keys=True))
        contents = {file.name: sha(file) for file in files}
        if any(name.endswith(".safetensors") for name in contents):
            return text_sha(json.dumps([_forward_fields(folder), contents], sort_keys=True))
    except (OSError, ValueError):
        pass
    return None


def tower_digest(folder: Path) -> str | None:
    """Return a digest of what makes features of images: tower, projector and their config.

    None if they cannot be read.
    """
    weights = weights_digest(folder, of_tower=True)
    try:
        config = {**read_json(folder / "config.json"), "text_config": None}
    except (OSError, ValueError, TypeError):
        return None
    fields = {key: config[key] for key in sorted(config.keys() - NOT_IN_A_FORWARD)}
    return text_sha(json.dumps([fields, weights], sort_keys=True)) if weights else None


def weights_digest(folder: Path, *, of_tower: bool = False) -> str | None:
    """Return a digest of a model's weights, however they are divided into files.

    Those of a tower are left out, or are alone digested. None if they cannot be read.

    It notices that the base of an adapter was replaced or mixed up. It covers name, dtype and shape
    of every tensor, and all bytes of a model up to 1 GiB. Of a larger one, whose files cannot be
    read at every chat, it covers 8 blocks of 512 bytes spread evenly over each tensor (2 blocks of
    more than 5,000 tensors): three megabytes of a model of 70B. Other training changes more weights
    than these blocks can miss; a deliberate change between them is not noticed.
    """
    try:
        tensors = {
            name: (file, facts)
            for file in weight_files(folder)
            for name, facts in _header(file)
            if bool(TOWER.search(name)) == of_tower
        }
        spans = {name: facts["data_offsets"] for name, (_, facts) in tensors.items()}
        is_whole = sum(end - start for start, end in spans.values()) <= MOST_HASHED
        spots = SPOTS if len(tensors) * SPOTS <= MOST_SPOTS else 2
        digest = sha256()
        for name in sorted(tensors):
            file, facts = tensors[name]
            digest.update(f"{name} {facts['dtype']} {facts['shape']}\n".encode())
            start, end = spans[name]
            for block in _blocks(file, start, end, None if is_whole else spots):
                digest.update(block)
        return digest.hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return None  # loading the model reports why


def _header(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and facts of the tensors in a safetensors file; offsets count from its start."""
    with open(file, "rb", opener=regular) as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > MOST_JSON_BYTES:
            raise ValueError("the header is too large")
        header = parse_json(opened.read(size))
    for name, facts in header.items():
        if name != "__metadata__":
            start, end = facts["data_offsets"]
            yield name, {**facts, "data_offsets": (8 + size + start, 8 + size + end)}


def _blocks(file: Path, start: int, end: int, spots: int | None) -> Iterator[bytes]:
    """Yield the bytes of a span: all of them, or `spots` evenly spread blocks."""
    offsets, length = [*range(start, end, BLOCK)], BLOCK
    if spots and end - start > spots * SPOT:
        offsets = [start + (end - start - SPOT) * i // (spots - 1) for i in range(spots)]
        length = SPOT
    with open(file, "rb", opener=regular) as opened:
        for offset in offsets:
            opened.seek(offset)
            yield opened.read(min(length, end - offset))


def has_other_weights(base: str, revision: str | None, trained_on: str | None) -> bool:
    """Return whether a model is known to have other weights than those with this digest."""
    folder = model_folder(base, revision) if trained_on else None
    digest = weights_digest(folder) if folder else None
    return digest is not None and digest != trained_on


def refuse_other_base(
    source: str | Path, base: str, revision: str | None, trained_on: str | None
) -> None:
    """Refuse a base that has other weights than the one an adapter was trained on, if known."""
    if has_other_weights(base, revision, trained_on):
        raise ConfigError(
            f"{source}: was trained on other weights than {base} has now; restore that base, or "
            "accept another one with --any-base (chat, score, export, merge)."
        )


def config_digest(name: str, revision: str | None) -> str | None:
    """Return a digest of the config fields alone; None if the file cannot be read."""
    folder = model_folder(name, revision)
    try:
        return text_sha(json.dumps(_forward_fields(folder), sort_keys=True)) if folder else None
    except (OSError, ValueError):
        return None


def _forward_fields(folder: Path) -> object:
    """Return the config fields that a forward pass reads, also in parts such as text_config."""

    def select(config: object) -> object:
        if not isinstance(config, dict):
            return config
        return {key: select(inner) for key, inner in config.items() if key not in NOT_IN_A_FORWARD}

    config = read_json(folder / "config.json")
    if isinstance(config, dict) and "text_config" in config:
        config = {key: inner for key, inner in config.items() if key not in TOWER_CONFIGS}
    return select(config)


def _has_tower(folder: Path) -> bool:
    names = (name for file in weight_files(folder) for name, _ in _header(file))
    return any(TOWER.search(name) for name in names)
