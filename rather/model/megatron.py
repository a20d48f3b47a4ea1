"""Weights of a Megatron checkpoint under the names of Hugging Face models.

Megatron keeps queries, keys and values of a layer in one tensor, by groups of heads, and the two
halves of a gated MLP in another; layers are stacked. So each weight of a model is a list of rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.checkpoint.torch_dist import METADATA, TorchDistFiles
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.files import read_bytes
from rather.model.files import ModelFiles, model_folder, weight_files

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LATEST = "latest_checkpointed_iteration.txt"
TOP = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
ATTENTION, MLP = "self_attention.linear_qkv", "mlp.linear_fc1"
PLAIN = {
    "input_layernorm.weight": f"{ATTENTION}.layer_norm_weight",
    "post_attention_layernorm.weight": f"{MLP}.layer_norm_weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
}
OPTIMIZER = re.compile(r"(^|\.)(optimizer|exp_avg|exp_avg_sq|fp32_param)\.|^chained_\d")


def checkpoint_folder(folder: Path) -> Path | None:
    """Return the folder of the tensors in a checkpoint of Megatron-LM, NeMo or mcore_adapter."""
    if (folder / LATEST).is_file():
        word = read_bytes(folder / LATEST, 64).decode("utf-8", "replace").strip()
        folder = folder / (f"iter_{int(word):07d}" if word.isdecimal() else "release")
    found = [*folder.glob(METADATA), *folder.glob(f"*/{METADATA}"), *folder.glob(f"*/*/{METADATA}")]
    return max(found).parent if found else None


def model_files(name: str, args: ModelArgs, config: Any) -> ModelFiles | None:
    """Return the weights of a model or a Megatron checkpoint; None if they are not here."""
    folder = model_folder(name, args.revision)
    if folder is None or not folder.exists():
        return None
    if args.config_from is None:
        return ModelFiles(weight_files(folder), config)
    place = checkpoint_folder(folder)
    if place is None:
        raise ConfigError(f"config_from is for Megatron checkpoints, and {name} is not one")
    return MegatronFiles(place, config.get_text_config())


class MegatronFiles(ModelFiles):
    """A checkpoint's weights by the names of the model that `config` describes."""

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__([])
        self.is_packed = True  # read weight by weight
        if config.model_type not in FAMILIES:
            raise ConfigError(
                f"{folder}: Megatron checkpoints of model family '{config.model_type}' are not "
                f"read; the families are {', '.join(FAMILIES)}"
            )
        self.source = TorchDistFiles(folder)
        # NeMo puts `module.` in front of every name.
        norm = TOP["model.norm.weight"]
        prefix = next((key for key in self.source if key.endswith(norm)), norm).removesuffix(norm)
        taken: Counter[str] = Counter()  # rows that the model has a place for
        stored: dict[str, int] = {}
        for name, short, layer, rows in weight_rows(config):
            key, dim = prefix + short, 0 if layer is None else 1
            if dim and key not in self.source:  # layers are not stacked
                key, layer, dim = prefix + short.replace("layers", f"layers.{layer}"), None, 0
            if key in self.source:
                shape = self.source.shape(key)
                rows = torch.arange(shape[dim]) if rows is None else rows
                spec = ShardSpec.full((len(rows), *shape[dim + 1 :]))
                self._shards[name] = {spec.offsets: (_Rows(self.source, key, layer, rows), spec)}
                taken[key] += len(rows)
                stored[key] = prod(shape[: dim + 1])
                if short in VOCABULARY:  # with unused rows at the end
                    stored[key] = min(stored[key], len(rows))
        if unknown := sorted(set(self.source) - set(taken)):
            reason = (
                f"{len(unknown)} tensors have no place in the model that config_from names: "
                f"{', '.join(unknown[:5])}"
            )
            if any(map(OPTIMIZER.search, unknown)):
                reason = (
                    f"has optimizer state ({unknown[0]}), which a new run does not continue; save "
                    "the checkpoint again without it (Megatron-LM: --no-save-optim)"
                )
            raise ConfigError(f"{folder}: {reason}")
        for key, count in stored.items():
            if count != taken[key]:
                raise ConfigError(
                    f"{folder}: {key} has {count} rows, and the model that config_from names has "
                    f"{taken[key]}"
                )


@dataclass(frozen=True)
class _Rows:
    """Some rows of a tensor, or of one layer of a stack, read like one of a safetensors file."""

    source: TorchDistFiles
    key: str
    layer: int | None
    rows: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype(self.key)

    def get_slice(self, _name: str) -> _Rows:
        return self

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        rows = self.rows[slices[0]]
        first = int(rows.min())
        block = ShardSpec.full(self.source.shape(self.key))
        dim = 0
        if self.layer is not None:
            block, dim = block.narrow(0, self.layer, 1), 1
        block = block.narrow(dim, first, int(rows.max()) + 1 - first)
        for number, part in enumerate(slices[1:], start=dim + 1):
            block = block.narrow(number, part.start, part.stop - part.start)
        values = self.source.read(self.key, block)
        return values.reshape(values.shape[dim:])[rows - first]


def weight_rows(config: Any) -> Iterator[tuple[str, str, int | None, Tensor | None]]:
    """Yield name, Megatron's key, layer and rows (None: all) of the weights of a model."""
    groups, queries = config.num_key_value_heads, config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // queries
    per_group, inner = queries // groups, config.intermediate_size
    heads = torch.arange((queries + 2 * groups) * width).view(groups, per_group + 2, width)
    parts = heads.split([per_group, 1, 1], dim=1)
    vocabulary = torch.arange(config.vocab_size)  # Megatron appends unused rows
    for name, key in TOP.items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            yield name, key, None, None if name == "model.norm.weight" else vocabulary
    for layer in range(config.num_hidden_layers):
        theirs, ours = "decoder.layers.", f"model.layers.{layer}."
        for name, key in PLAIN.items():
            yield ours + name, theirs + key, layer, None
        for letter, part in zip("qkv", parts, strict=True):
            for kind in ("weight", "bias"):
                name = f"{ours}self_attn.{letter}_proj.{kind}"
                yield name, f"{theirs}{ATTENTION}.{kind}", layer, part.reshape(-1)
        for half, word in enumerate(("gate", "up")):
            rows = torch.arange(half * inner, (half + 1) * inner)
            yield f"{ours}mlp.{word}_proj.weight", f"{theirs}{MLP}.weight", layer, rows
