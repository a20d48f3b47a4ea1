"""The sizes of a model from its config.json, without its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM

from rather.config.paths import is_local
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.model.attention import IMPLEMENTATION

LAYER = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """Widths of a decoder, and the shapes of all its parameters; tied ones count once."""

    family: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int  # width of one
    inner: int
    vocabulary: int
    tied: bool
    stored: int  # bytes of a weight on the disk
    shapes: Shapes

    @property
    def query(self) -> int:
        return self.heads * self.head

    @property
    def key(self) -> int:
        return self.key_heads * self.head

    @property
    def weights(self) -> int:
        return sum(map(prod, self.shapes.values()))

    @property
    def in_layers(self) -> int:
        return sum(prod(shape) for name, shape in self.shapes.items() if LAYER.search(name))

    @property
    def of_head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def gated(self) -> bool:
        """Return whether two wide products open the MLP."""
        return any("gate" in name for name in self.shapes)

    @property
    def norms(self) -> list[int]:
        """Return the widths of the norms of one layer."""
        named = {
            LAYER.split(name)[1]: shape for name, shape in self.shapes.items() if LAYER.search(name)
        }
        wide = {"q_norm": self.query, "k_norm": self.key}
        norms = [
            key.rsplit(".", 2)[-2] for key in named if "norm" in key and key.endswith("weight")
        ]
        return [wide.get(name, self.hidden) for name in norms]


def sizes_of(name: str, args: ModelArgs) -> Sizes:
    """Return the sizes of a model folder, or of a hub model that has been downloaded."""
    folder = _folder(name, args.revision)
    try:
        config = AutoConfig.from_pretrained(
            folder, trust_remote_code=args.trust_remote_code
        )  # local  # nosec B615
        shapes = _shapes(config, args)
        text = config.get_text_config()
        heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
        return Sizes(
            family=config.model_type,
            hidden=hidden,
            layers=int(text.num_hidden_layers),
            heads=heads,
            key_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head=int(getattr(text, "head_dim", None) or hidden // heads),
            inner=int(getattr(text, "intermediate_size", None) or 4 * hidden),
            vocabulary=int(text.vocab_size),
            tied=bool(config.tie_word_embeddings),
            stored=(config.dtype or torch.float32).itemsize,
            shapes=shapes,
        )
    except Exception as error:  # a config.json may be anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{folder / 'config.json'}: is not the config of a causal language model: {reason}"
        ) from error


def few_layers(name: str, args: ModelArgs, layers: int, device: str, dtype: torch.dtype) -> Any:
    """Return the model with random weights and few layers; with its adapter, if it has one."""
    folder = _folder(name, args.revision)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)  # local  # nosec B615
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )
        if args.has_adapter:
            from rather.model.adapters import inject  # PEFT takes seconds to import

            inject(model, args)
    for parameter in model.parameters():
        if args.has_adapter and parameter.requires_grad:
            parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(
                0, 0.02
            )
    return model.eval()


def _shapes(config: Any, args: ModelArgs) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, trust_remote_code=args.trust_remote_code
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _folder(name: str, revision: str | None) -> Path:
    if is_local(name):
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder.absolute()}: has no config.json, which gives the sizes of a model."
            )
        return folder
    try:
        wanted = ["config.json", "*.py"]
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=True)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: is neither a folder nor a downloaded model; get its config.json with "
            f"`hf download {name} config.json`, or use a folder."
        ) from error
