"""The files of a model or adapter folder: where it is, what it contains, and its digest.

A folder comes from others: names and links that lead out of it are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import Tensor

from rather.checkpoint.sharded_tensors import Cast, ShardedFiles, ShardSpec, TensorStream
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
# Files have matrices for each expert, a model stacks them: (stack, block of its rows), by the
# names of most families and of Mixtral.
PARTS = {
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0),
}  # fmt: skip
EXPERT = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
# Parts of a checkpoint that only images or sounds reach, and older names of its language model.
TOWER = re.compile(
    r"(?:^|\.)(?:(?:vision|visual|image|audio|speech|multi_modal|mm_|embed_vision|embed_audio|"
    r"connector)[a-z_]*\.|image_newline$)"
)
TOWER_CONFIGS = ("vision_config", "audio_config")
BACKBONE = "backbone."  # Nemotron-H's name of the model without its head
LANGUAGE_MODEL = "model.language_model."
TEXT_MODEL = "model.text_model."  # SmolVLM's name of it
OLDER = ("language_model.model.", "language_model.", "model.")
KEEPS_OLDER = ("llama4",)  # families whose class still has these names
CORRECTION = ".e_score_correction_bias"  # a buffer of a router; float32, and not trained
STACK = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")


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
    """The weights of a model folder; also, by the model's own names, what they are stacked to."""

    def __init__(self, files: Iterable[Path]) -> None:
        files = list(files)
        super().__init__(files)
        self.folder = files[0].parent if files else None
        self.file_names: dict[str, str] = {}  # of tensors that are stored under older names
        self.tower = [name for name in self._shards if TOWER.search(name)]
        current = (LANGUAGE_MODEL, TEXT_MODEL)
        if self.tower and not any(name.startswith(current) for name in self._shards):
            self._rename_language_model()
        for name in [name for name in self._shards if name.startswith(BACKBONE)]:
            self._rename(name, "model." + name.removeprefix(BACKBONE))
        packed = [name for name in self._shards if name.endswith(BLOCKS)]
        self.is_packed = bool(packed)
        for name in packed:
            self._unpack(name.removesuffix(BLOCKS))
        self._stored = list(self._shards)
        self._stack_experts()

    def _stack_experts(self) -> None:
        """Offer experts that are stored one by one under the names that the model has for them."""
        matrices: dict[str, dict[tuple[int, int], str]] = {}
        for name in self._stored:
            if (match := EXPERT.fullmatch(name)) and match[3] in PARTS:
                stack, block = PARTS[match[3]]
                of_stack = matrices.setdefault(f"{match[1]}.mlp.experts.{stack}", {})
                of_stack[int(match[2]), block] = name
            elif ".block_sparse_moe." in name:
                self._shards[name.replace(".block_sparse_moe.", ".mlp.")] = self._under(name)
        for stack, of_stack in matrices.items():
            self._stack(stack, of_stack)

    def _under(self, name: str) -> dict[tuple[int, ...], Any]:
        """Return the shards of a tensor, for another name than that in its file."""
        return {
            offsets: (_Renamed(file, name), spec)
            for offsets, (file, spec) in self._shards[name].items()
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

    def _stack(self, stack: str, matrices: Mapping[tuple[int, int], str]) -> None:
        """Offer the matrices of all experts, by (expert, block), as one tensor."""
        if flat := [name for name in matrices.values() if len(self.shape(name)) != 2]:
            raise ConfigError(
                f"{flat[0]!r} of the weights has the shape {self.shape(flat[0])}; the matrix of "
                "an expert has two dimensions"
            )
        rows, width = self.shape(next(iter(matrices.values())))
        experts, blocks = (max(numbers) + 1 for numbers in zip(*matrices, strict=True))
        shape = (experts, blocks * rows, width)
        self._shards[stack] = {
            (expert, block * rows, 0): (
                _Renamed(next(iter(self._shards[name].values()))[0], name, stacked=True),
                ShardSpec(shape, (expert, block * rows, 0), (1, *self.shape(name))),
            )
            for (expert, block), name in matrices.items()
        }

    def _rename_language_model(self) -> None:
        model_type = read_json(self.folder / "config.json").get("model_type") if self.folder else ""
        if model_type in KEEPS_OLDER:
            return
        for name in set(self._shards) - set(self.tower):
            prefix = next((prefix for prefix in OLDER if name.startswith(prefix)), "")
            plain = name.removeprefix(prefix)
            current = plain if plain.startswith("lm_head.") else LANGUAGE_MODEL + plain
            if prefix and current != name:
                self._rename(name, current)

    def _rename(self, name: str, current: str) -> None:
        self.file_names[current] = name
        self._shards[current] = self._under(name)
        del self._shards[name]

    def unchanged(self, name: str) -> TensorStream:
        """Return a tensor as it is stored, bit by bit."""
        return TensorStream(self.dtype(name), self.shape(name), lambda: iter([self[name]]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class LoadedWeights(ModelFiles):
    """The weights of a model that transformers has read whole, under the model's own names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__([])
        for name, tensor in tensors.items():
            spec = ShardSpec.full(tensor.shape)
            self._shards[name] = {spec.offsets: (InMemory(tensor), spec)}
        self._stored = list(self._shards)


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


def file_streams(
    stored: ShardedFiles, cast: Cast, family: str, source: Iterable[str] = ()
) -> dict[str, TensorStream]:
    """Return a policy's weights under the names in `source`, or those usual for its family.

    Experts are unstacked, and rounded as parts of their stack. At most some rows of one weight are
    in memory.
    """
    source_names = set(source)
    mixtral = family == "mixtral"
    if source_names:
        mixtral = any(".block_sparse_moe." in name for name in source_names)
    block = "block_sparse_moe" if mixtral else "mlp"
    streams: dict[str, TensorStream] = {}
    for name in sorted(stored):
        plain = name.removeprefix("causal_lm.")
        match = STACK.fullmatch(plain)
        if match is None or plain in source_names:
            streams[plain.replace(".mlp.", f".{block}.")] = stored.stream(name, cast)
            continue
        keys = [key for key, (stack, _) in PARTS.items() if stack == match[2]]
        keys = [key for key in keys if key.startswith("w") == mixtral]
        full_spec = ShardSpec.full(stored.shape(name))
        experts, height, width = full_spec.whole
        rows = height // len(keys)
        for expert, key in product(range(experts), keys):
            spec = full_spec.narrow(0, expert, 1).narrow(1, PARTS[key][1] * rows, rows)
            chunks = partial(_one_expert, stored, cast, name, spec)
            plain = f"{match[1]}.{block}.experts.{expert}.{key}.weight"
            streams[plain] = TensorStream(cast.dtype, (rows, width), chunks)
    return streams


def _one_expert(stored: ShardedFiles, cast: Cast, name: str, spec: ShardSpec) -> Iterator[Tensor]:
    yield cast(name, stored.read(name, spec), spec)[0]


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
