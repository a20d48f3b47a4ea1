"""What a model's config.json says without its weights: sizes, and whether a layout divides it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rather.config.paths import is_local
from rather.config.schema import ModelArgs, RoleConfig
from rather.config.strategies import layout
from rather.errors import ConfigError
from rather.files import inspect_folder
from rather.model.attention import IMPLEMENTATION
from rather.model.check import chosen_of, experts_of, over_layers, shorten
from rather.model.reward import auto_class
from rather.model.towers import leave_tower_out, new_model

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
BY_HEADS = ("colwise", "rowwise")  # styles of transformers' plans that give each rank whole heads

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """Widths of a decoder, and the shapes of all its parameters; tied ones count once."""

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
    experts: int = 0  # of a layer with experts
    chosen: int = 0  # of these by a token
    router_loss: float = 0.0  # its weight if none is set
    tower: Shapes = field(default_factory=dict)  # what only images or sounds reach

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
    def of_experts(self) -> int:
        """The weights of all experts among which routers choose."""
        return stacked(self.shapes)

    @property
    def idle(self) -> int:
        """The weights that a token does not use: those of the experts that it did not choose."""
        return self.of_experts // self.experts * (self.experts - self.chosen) if self.experts else 0

    @property
    def active(self) -> int:
        return self.weights - self.idle

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
        in_layer = dict.fromkeys(
            LAYER.split(name)[-1] for name in self.shapes if LAYER.search(name)
        )
        norms = [name.split(".")[-2] for name in in_layer if re.search(r"norm.*weight$", name)]
        wide = {"q_norm": self.query, "k_norm": self.key}
        return [wide.get(name, self.hidden) for name in norms]


def stacked(shapes: Shapes) -> int:
    """Return how many weights are in stacked experts."""
    return sum(prod(shape) for name, shape in shapes.items() if ".experts." in name)


def _inner(text: Any, shapes: Shapes, chosen: int) -> int:
    """Return the width of the MLP that a token uses; with experts, of those chosen and shared."""
    last = {
        name: shape
        for name, shape in shapes.items()
        if ".experts.down_proj" in name and len(shape) == 3
    }
    if not last:
        width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        return max(width) if isinstance(width, list) else int(width)  # Gemma 3n: of each layer
    shared = [shape[1] for name, shape in shapes.items() if "shared_expert" in name
              and "down_proj" in name]  # fmt: skip
    return chosen * max(shape[2] for shape in last.values()) + max(shared, default=0)


def sizes_of(name: str, args: ModelArgs) -> Sizes:
    """Return the sizes of a model folder, or of a hub model that has been downloaded."""
    name, written = args.config_from or name, 0
    with suppress(OSError, ValueError, RuntimeError):  # a hub's name, or not a path: refused below
        written = (Path(name).expanduser() / "config.json").stat().st_mtime_ns
    return _sizes_of(name, args.revision, args.trust_remote_code, written)


@lru_cache(1)  # a start needs them several times
def _sizes_of(name: str, revision: str | None, trusted: bool, _written: int) -> Sizes:
    try:
        args = ModelArgs(revision=revision, trust_remote_code=trusted)
        config = _config(name, args, local_files_only=True)
        with torch.device("meta"):
            loader = auto_class(config, reward=False)
            model: Any = new_model(loader, config, keeps_tower=True, trust_remote_code=trusted)
        whole = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        leave_tower_out(model)
        text = config.get_text_config()
        heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
        shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
        experts = experts_of(config)
        chosen = chosen_of(config) if experts else 0
        return Sizes(
            hidden=hidden,
            layers=int(text.num_hidden_layers),
            heads=heads,
            key_heads=max(over_layers(text, "num_key_value_heads"), default=heads),
            head=max(over_layers(text, "head_dim"), default=hidden // heads),
            inner=_inner(text, shapes, chosen),
            vocabulary=int(text.vocab_size),
            tied=bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings)),
            stored=(config.dtype or torch.float32).itemsize,
            shapes=shapes,
            experts=experts,
            chosen=chosen,
            router_loss=float(getattr(text, "router_aux_loss_coef", None) or 0) if experts else 0.0,
            tower={key: shape for key, shape in whole.items() if key not in shapes},
        )
    except Exception as error:  # a config.json may be anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not is_local(name) and isinstance(error, OSError):
            reason = "not a folder here, and not in the hub's cache"
        raise ConfigError(
            f"{name}: found no config.json of a causal language model ({reason}); use a folder "
            f"that has one, or get it with `hf download {name} config.json`."
        ) from error


def few_layers(name: str, args: ModelArgs, layers: int, device: str, dtype: torch.dtype) -> Any:
    """Return the model with random weights and few layers; with its adapter, if it has one."""
    config = _config(name, args, local_files_only=True)
    shorten(config.get_text_config(), range(layers))
    with torch.device(device):
        loader = auto_class(config, reward=False)
        model: Any = new_model(loader, config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        if args.has_adapter:
            from rather.model.adapters import inject  # PEFT takes seconds to import

            inject(model, args)
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                parameter.data = torch.empty(parameter.shape, dtype=dtype).normal_(0, 0.02)
    return model.eval()


def config_of(name: str, args: ModelArgs) -> Any:
    """Return the config of a model folder, or of a hub model that has been downloaded."""
    return _config(name, args, local_files_only=True)


def model_problems(name: str, role: RoleConfig) -> Iterator[str]:
    """Yield why a model cannot be trained or divided as wanted; loading reports a bad config."""
    degrees = layout(role)
    try:
        config = _config(role.model_path, role.model_args)
        text = config.get_text_config()
    except Exception:  # a config.json may be anything
        return
    for key, count in _undivided_heads(text, degrees.tp):
        yield (
            f"{name}.strategy_args.tp_size: {degrees.tp} does not divide {key}: {count} of "
            f"{role.model_path}"
        )
    if degrees.ep > 1 and (experts_of(config) % degrees.ep or not experts_of(config)):
        yield (
            f"{name}.strategy_args.ep_size: {degrees.ep} does not divide the {experts_of(config)} "
            f"experts of a layer of {role.model_path}"
        )
    stages = degrees.pipeline.stages if degrees.pp > 1 else 1
    if (layers := getattr(text, "num_hidden_layers", None)) and stages > layers:
        yield (
            f"{name}.strategy_args.pp_size: {degrees.pp} ranks x {degrees.virtual} = {stages} "
            f"stages, but {role.model_path} has only {layers} layers"
        )


def _config(name: str, args: ModelArgs, **options: bool) -> Any:
    name = args.config_from or name
    path = str(Path(name).expanduser()) if is_local(name) else name
    inspect_folder(path, args.revision, local_files_only=options.get("local_files_only", False))
    options["trust_remote_code"] = args.trust_remote_code
    return AutoConfig.from_pretrained(path, revision=args.revision, **options)  # nosec B615


def _undivided_heads(config: Any, tp: int) -> Iterator[tuple[str, int]]:
    """Yield the numbers of heads that this many ranks cannot divide, by key."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    if not any(style in BY_HEADS and "att" in module for module, style in plan.items()):
        return
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = min(over_layers(config, key), default=tp)
        if count % tp and (key == "num_attention_heads" or tp % count):
            yield key, count
